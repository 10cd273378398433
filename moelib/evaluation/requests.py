"""Requests: texts that are to be scored, as tokens."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moelib.data.tokenizer import Tokenizer

Ids = npt.NDArray[np.int32]


class Request(NamedTuple):
    """Tokens to score: those of the continuation, each after all that stand before it."""

    context: Ids
    continuation: Ids

    @property
    def num_tokens(self) -> int:
        """Tokens of both."""
        return len(self.context) + len(self.continuation)


def encode_pairs(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> list[Request]:
    """Returns the tokens of (context, continuation) texts, split as lm-eval splits them.

    Spaces at the end of a context go to the continuation. Its tokens are those of the whole text
    but for as many as the context alone has. An empty context is the end-of-text token.
    """
    moved = [_move_spaces(*pair) for pair in pairs]
    contexts = list(dict.fromkeys(context for context, _ in moved))
    known = dict(zip(contexts, encode_texts(tokenizer, contexts), strict=True))
    wholes = encode_texts(tokenizer, (context + rest for context, rest in moved))
    return [
        _split(known[context], whole, tokenizer.eos_id)
        for (context, _), whole in zip(moved, wholes, strict=True)
    ]


def encode_texts(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[Ids]:
    """Yields the tokens of each text."""
    for chunk in itertools.batched(texts, 1000):
        for ids in tokenizer.encode_batch(chunk):
            yield np.array(ids, np.int32)


def _move_spaces(context: str, continuation: str) -> tuple[str, str]:
    stripped = context.rstrip()
    return stripped, context[len(stripped) :] + continuation


def _split(context: Ids, whole: Ids, eos_id: int) -> Request:
    if len(context):
        return Request(context, whole[len(context) :].copy())
    if len(whole) and whole[0] == eos_id:
        return Request(whole[:1], whole[1:])
    return Request(np.array([eos_id], np.int32), whole)
