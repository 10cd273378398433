"""Text from tokens while they come: whole characters, and nothing from a stop string on."""

from collections.abc import Callable, Iterable, Iterator, Sequence


def text_of(
    tokens: Sequence[int],
    prompt: Sequence[int],
    decode: Callable[[Sequence[int]], str],
    stops: Sequence[str] = (),
) -> str:
    """Returns the text of the tokens that follow a prompt, up to the first stop string in it."""
    text = decode([*prompt, *tokens])[len(decode(prompt)) :]
    return text[: _end(text, stops)]


def pieces_of_text(
    tokens: Iterable[int],
    prompt: Sequence[int],
    decode: Callable[[Sequence[int]], str],
    stops: Sequence[str] = (),
) -> Iterator[str]:
    """Yields the text of tokens that follow a prompt, as far as it is certain; takes no more then.

    A part of a character waits for the rest of it, and what may begin a stop string for what comes.

    Args:
        tokens: One after the other.
        prompt: The tokens before them.
        decode: Returns the text of tokens, with U+FFFD for what is no UTF-8.
        stops: Texts that end the text; they are no part of it.
    """
    taken: list[int] = []
    text, shown = "", 0
    for token in tokens:
        taken.append(token)
        whole = text_of(taken, prompt, decode)
        text = whole[: _end(whole, stops)]
        if len(text) < len(whole):
            break
        certain = text.rstrip("\ufffd")
        certain = certain[: len(certain) - _num_begun(certain, stops)]
        if len(certain) > shown:
            yield certain[shown:]
            shown = len(certain)
    yield text[shown:]


def _end(text: str, stops: Sequence[str]) -> int:
    """Returns where the first stop string begins, or the length of a text without any."""
    found = (text.find(stop) for stop in stops)
    return min((at for at in found if at >= 0), default=len(text))


def _num_begun(text: str, stops: Sequence[str]) -> int:
    """Returns how many characters at the end of a text may be the beginning of a stop string."""
    begun = (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
    return max(begun, default=0)
