"""Requests: texts to score, as tokens."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moelib.data.tokens.tokenizer import Tokenizer

Ids = npt.NDArray[np.int32]


class Request(NamedTuple):
    """The tokens of a continuation, which are scored, and those of its context."""

    context: Ids
    continuation: Ids

    @property
    def num_tokens(self) -> int:
        """Number of tokens of context and continuation."""
        return len(self.context) + len(self.continuation)


def encode_pairs(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> list[Request]:
    """Returns the tokens of (context, continuation) texts, split as lm-eval splits them.

    Spaces at the end of a context move to the continuation. The continuation has the tokens of the
    whole text without as many as the context alone has. Contexts begin with BOS if the tokenizer
    adds it; an empty context is the tokenizer's `prefix_id`.
    """
    pairs = [_move_spaces(*pair) for pair in pairs]
    contexts = list(dict.fromkeys(context for context, _ in pairs))
    encoded = dict(zip(contexts, encode_texts(tokenizer.encode_prompts, contexts), strict=True))
    wholes = encode_texts(tokenizer.encode_prompts, map("".join, pairs))
    return [
        _split(encoded[context], whole, tokenizer.prefix_id)
        for (context, _), whole in zip(pairs, wholes, strict=True)
    ]


def encode_texts(
    encode: Callable[[Sequence[str]], list[list[int]]], texts: Iterable[str]
) -> Iterator[Ids]:
    """Yields the tokens of each text, from a method of a tokenizer that encodes several."""
    for chunk in itertools.batched(texts, 1000):
        yield from (np.array(ids, np.int32) for ids in encode(chunk))


def _move_spaces(context: str, continuation: str) -> tuple[str, str]:
    stripped = context.rstrip()
    return stripped, context[len(stripped) :] + continuation


def _split(context: Ids, whole: Ids, prefix_id: int) -> Request:
    if len(context):
        return Request(context, whole[len(context) :].copy())
    if len(whole) and whole[0] == prefix_id:
        return Request(whole[:1], whole[1:])
    return Request(np.array([prefix_id], np.int32), whole)
