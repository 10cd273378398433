"""Long documents in pieces: the ids of the pieces, one after another, are those of the document.

The memory that `tokenizers` takes is some 200 bytes per byte of text, until the text is encoded. A
document is therefore cut where the pre-tokenizer begins a new word, whatever the words are, since
ids depend on words alone. A rule names such positions. It applies to a tokenizer that separates
there all pairs of a list of characters, in several contexts; each cut is also checked in the text
around it.
"""

import itertools
import re
from collections.abc import Iterator
from typing import Any

PIECE_CHARACTERS = 1 << 17
_CONTEXT = 256  # Characters on either side of a cut in which it is checked.
_WINDOW = 4096  # Characters that are searched for a cut at a time.
_TRIES = 8  # Cuts that are checked per window and rule.

# Positions of cuts, and what stands there between two characters: text before and after the cut.
_RULES = (
    (re.compile(r"(?<=\S)(?= \S)"), "", " "),
    (re.compile(r"(?<=\n)(?=\S)"), "\n", ""),
    (re.compile(r"(?<=[^\W_])(?=[、。，])"), "", "，"),
)
_CHARACTERS = (
    "a",
    "Z",
    "7",
    *".,:;!?'\"`()[]{}<>/\\-_#@$%&*+=|~^",
    "é",
    "e\u0301",
    "中",
    "。",
    "🙂",
)
_CONTEXTS = (("x ", " x"), ("12", "34"), ('"', '"'), ("'", "'"), ("(", ")"), ("<", ">"))
_PROBES = [("", left, right, "") for left, right in itertools.product(_CHARACTERS, repeat=2)] + [
    (prefix, left, left, suffix) for left in _CHARACTERS for prefix, suffix in _CONTEXTS
]


class PieceCutter:
    """Cuts the documents of a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        """Finds the rules that apply to a `tokenizers.Tokenizer`, in a tenth of a second."""
        self._tokenizer = tokenizer
        self._rules = [
            rule
            for rule, before, after in _RULES
            if all(
                self._separates(prefix + left + before, after + right + suffix)
                for prefix, left, right, suffix in _PROBES
                if rule.search(left + before + after + right)
            )
        ]

    def pieces(self, text: str) -> Iterator[str]:
        """Yields pieces of some `PIECE_CHARACTERS`; more where no cut is known to be safe."""
        start = 0
        while len(text) - start > PIECE_CHARACTERS:
            end = self._cut(text, start)
            yield text[start:end]
            start = end
        if start < len(text):
            yield text[start:]

    def _cut(self, text: str, start: int) -> int:
        """Returns the last cut within `PIECE_CHARACTERS`, else the first after them."""
        wanted = start + PIECE_CHARACTERS
        before = range(wanted - _WINDOW, start, -_WINDOW)
        for begin in itertools.chain(before, range(wanted, len(text), _WINDOW)):
            for rule in self._rules:
                found = [match.start() for match in rule.finditer(text, begin, begin + _WINDOW)]
                for cut in found[: -_TRIES - 1 : -1]:
                    left, right = text[max(cut - _CONTEXT, 0) : cut], text[cut : cut + _CONTEXT]
                    if self._separates(left, right):
                        return cut
        return len(text)

    def _separates(self, left: str, right: str) -> bool:
        """Returns whether the words, and the ids, of both texts are those of the joined text."""
        return all(
            function(left + right) == function(left) + function(right)
            for function in (self._words, self._ids)
        )

    def _words(self, text: str) -> list[str]:
        normalizer, splitter = self._tokenizer.normalizer, self._tokenizer.pre_tokenizer
        normal = normalizer.normalize_str(text) if normalizer else text
        return [word for word, _ in splitter.pre_tokenize_str(normal)] if splitter else [normal]

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids
