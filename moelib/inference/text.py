"""Text from tokens while they come: whole characters, and nothing from a stop string on."""

from collections.abc import Callable, Iterable, Iterator, Sequence

_Decode = Callable[[Sequence[int]], str]

_FEW = 16  # Tokens that are enough to decode the next one by,
_MANY = 64  # and how many are decoded before those in front are left out.


def text_of(
    tokens: Sequence[int], prompt: Sequence[int], decode: _Decode, stops: Sequence[str] = ()
) -> str:
    """Returns the text of the tokens that follow a prompt, up to the first stop string in it.

    Raises:
        ValueError: If a stop string is empty.
    """
    _check(stops)
    text = decode([*prompt, *tokens])[len(decode(prompt)) :]
    return text[: _end(text, stops)]


def pieces_of_text(
    tokens: Iterable[int], prompt: Sequence[int], decode: _Decode, stops: Sequence[str] = ()
) -> Iterator[str]:
    """Returns the text of tokens that follow a prompt, as far as it is certain; takes no more then.

    A part of a character waits for the rest of it, and what may begin a stop string for what comes.
    A token takes as long after a long text as after a short one.

    Args:
        tokens: One after the other.
        prompt: The tokens before them.
        decode: Returns the text of tokens, with U+FFFD for what is no UTF-8.
        stops: Texts that end the text; they are no part of it.

    Raises:
        ValueError: If a stop string is empty.
    """
    _check(stops)
    return _pieces(tokens, list(prompt), decode, stops)


def _pieces(
    tokens: Iterable[int], prompt: list[int], decode: _Decode, stops: Sequence[str]
) -> Iterator[str]:
    last, whole = _shortened(prompt, decode(prompt), decode)
    shown = len(whole)  # Of the text of the last tokens.
    text = ""
    for token in tokens:
        last.append(token)
        whole = decode(last)
        text = whole[shown:]
        end = _end(text, stops)
        if end < len(text):
            text = text[:end]
            break
        certain = text.rstrip("\ufffd")
        certain = certain[: len(certain) - _num_begun(certain, stops)]
        if certain:
            yield certain
            shown += len(certain)
            text = text[len(certain) :]
        if len(last) > _MANY and not whole.endswith("\ufffd"):
            fewer, rest = _shortened(last, whole, decode)
            if len(text) <= len(rest):
                last, shown = fewer, len(rest) - len(text)
    yield text


def _shortened(tokens: list[int], text: str, decode: _Decode) -> tuple[list[int], str]:
    """Returns some of the last tokens, and their text, with which that of all of them ends.

    Alone, tokens may have another text: if the first is a part of a character, for example.
    """
    num = _FEW
    while num < len(tokens):
        end = decode(tokens[-num:])
        if end and text.endswith(end):
            return tokens[-num:], end
        num *= 2
    return tokens, text


def _check(stops: Sequence[str]) -> None:
    if "" in stops:
        raise ValueError("--stop is empty; set it to a text of one character or more.")


def _end(text: str, stops: Sequence[str]) -> int:
    """Returns where the first stop string begins, or the length of a text without any."""
    found = (text.find(stop) for stop in stops)
    return min((at for at in found if at >= 0), default=len(text))


def _num_begun(text: str, stops: Sequence[str]) -> int:
    """Returns how many characters at the end of a text may be the beginning of a stop string."""
    begun = (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
    return max(begun, default=0)
