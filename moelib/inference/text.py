"""Text from tokens as they arrive: whole characters, ended before a stop string."""

import itertools
from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]  # Text of token ids, with U+FFFD for invalid UTF-8.

_CONTEXT = 16  # Number of preceding tokens that suffice to decode the next one.
_WINDOW = 64  # Number of tokens decoded together before the first ones are dropped.


def text_of(
    tokens: Sequence[int], prompt: Sequence[int], decode: Decode, stops: Sequence[str] = ()
) -> str:
    """Returns the text of the tokens that follow a prompt, up to the first stop string.

    It begins with the character, if any, that the prompt has a part of.
    """
    whole = decode([*prompt, *tokens])
    text = whole[_num_common(decode(prompt), whole) :]
    return text[: _end(text, stops)]


class TextStream:
    """Decodes the tokens that follow a prompt one by one, each in constant time.

    The pieces of `add`, and `rest` after the last token, together are `text_of` the tokens.

    Attributes:
        rest: Decoded text that waits for later tokens: an incomplete character, or a part that may
            be the beginning of a stop string.
        ended: Whether a stop string has been reached; no further token may be added.
    """

    def __init__(self, prompt: Sequence[int], decode: Decode, stops: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode, stops
        self._tokens, text = _shortened(list(prompt), decode(prompt), decode)
        self._num_shown = len(text)  # Characters of the text of `_tokens`.
        self._prompt_text: str | None = text  # That of `_tokens` until the first piece is shown.
        self.rest, self.ended = "", False

    def add(self, token: int) -> str:
        """Returns the text that one more token makes certain."""
        self._tokens.append(token)
        whole = self._decode(self._tokens)
        if self._prompt_text is not None:
            self._num_shown = _num_common(self._prompt_text, whole)
        text = whole[self._num_shown :]
        end = _end(text, self._stops)
        if end < len(text):
            self.rest, self.ended = "", True
            return text[:end]
        certain = text.rstrip("\ufffd")
        certain = certain[: len(certain) - _num_begun(certain, self._stops)]
        self._num_shown += len(certain)
        self._prompt_text = None if certain else self._prompt_text
        self.rest = text[len(certain) :]
        if len(self._tokens) > _WINDOW and not whole.endswith("\ufffd"):
            fewer, end_text = _shortened(self._tokens, whole, self._decode)
            if len(self.rest) <= len(end_text):
                self._tokens, self._num_shown = fewer, len(end_text) - len(self.rest)
                self._prompt_text = None
        return certain


def _shortened(tokens: list[int], text: str, decode: Decode) -> tuple[list[int], str]:
    """Returns a few of the last tokens and their text, which ends the text of all tokens.

    Decoded alone, tokens may give another text: the first may be a part of a character.
    """
    num = _CONTEXT
    while num < len(tokens):
        end = decode(tokens[-num:])
        if end and text.endswith(end):
            return tokens[-num:], end
        num *= 2
    return tokens, text


def _num_common(begin: str, text: str) -> int:
    """Returns the number of characters that two texts begin with."""
    both = zip(begin, text, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], both))


def _end(text: str, stops: Sequence[str]) -> int:
    """Returns the index of the first stop string, or the length of a text without any."""
    found = (text.find(stop) for stop in stops)
    return min((at for at in found if at >= 0), default=len(text))


def _num_begun(text: str, stops: Sequence[str]) -> int:
    """Returns the number of characters at the end of a text that may begin a stop string."""
    begun = (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
    return max(begun, default=0)
