"""Statistics of routings: load, overlap, co-activation, specialization.

All take the expert ids of tokens [N, K] in unsigned integers, best first, where E stands for no
expert, as routing logs hold them. They count in parts of some tokens, so that memory is bounded.

Letters: N tokens, K experts per token, E experts, V token ids.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_CHUNK = 1 << 16  # Tokens that are counted at once, whose integers stay in the cache.
_LARGE_CHUNK = 1 << 20  # Those that are counted in a large table.

Ids = npt.NDArray[np.unsignedinteger]
Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def _chunks(*arrays: np.ndarray, size: int = _CHUNK) -> Iterator[tuple[np.ndarray, ...]]:
    for start in range(0, len(arrays[0]), size):
        yield tuple(array[start : start + size] for array in arrays)


def load(ids: Ids, num_experts: int) -> Counts:
    """Returns the number of assignments to each expert [E]."""
    total = np.zeros(num_experts + 1, np.int64)
    for (part,) in _chunks(ids):
        total += np.bincount(part.ravel(), minlength=num_experts + 1)
    return total[:-1]


def load_violation(counts: np.ndarray) -> float:
    """Returns max load / mean load - 1 (MaxVio), from 0 to E - 1; NaN without assignments.

    Source: Wang et al., arXiv:2408.15664, sec. 4.
    """
    return float(counts.max() / counts.mean() - 1) if counts.any() else np.nan


def overlap(first: Ids, second: Ids, num_experts: int) -> Counts:
    """Returns the sum over tokens of |top-k of the first and of the second|, k = 1 ... K [K].

    Args:
        first: Ids of tokens by one routing.
        second: Ids of the same tokens by another.
        num_experts: E.
    """
    top_k = first.shape[1]
    found = np.zeros(top_k, np.int64)
    for a, b in _chunks(first, second):
        a, b = np.ascontiguousarray(a.T), np.array(b.T, order="C")  # [K, N], b a copy.
        b[b == num_experts] = num_experts + 1  # No expert equals no expert of another routing.
        for i in range(top_k):
            for j in range(top_k):
                found[max(i, j)] += np.count_nonzero(a[i] == b[j])
    return np.cumsum(found)


def assignments(ids: Ids, num_experts: int) -> Counts:
    """Returns the number of assignments to the k best experts of tokens, k = 1 ... K [K]."""
    return np.cumsum([np.count_nonzero(ids[:, i] < num_experts) for i in range(ids.shape[1])])


def coactivation(ids: Ids, num_experts: int) -> Counts:
    """Returns the number of tokens that go to both experts [E, E]; to one, on the diagonal."""
    size = num_experts + 1
    pairs = np.zeros(size * size, np.int64)
    for (part,) in _chunks(ids):
        columns = np.ascontiguousarray(part.T).astype(np.intp)
        for i in range(len(columns)):
            scaled = columns[i] * size
            for j in range(i):
                pairs += np.bincount(scaled + columns[j], minlength=size * size)
    square = pairs.reshape(size, size)[:-1, :-1]
    counts = square + square.T
    np.fill_diagonal(counts, load(ids, num_experts))
    return counts


def conditional(counts: Counts) -> Floats:
    """Returns P(j | i) [E, E], that a token of expert i also goes to j; NaN if i has no token."""
    tokens = np.diagonal(counts)[:, None]
    return np.where(tokens > 0, counts / np.maximum(tokens, 1), np.nan)


def token_counts(tokens: Ids, vocab_size: int) -> Counts:
    """Returns the number of occurrences of each token id [V]."""
    total = np.zeros(vocab_size, np.int64)
    for (part,) in _chunks(tokens, size=_LARGE_CHUNK):
        total += np.bincount(part, minlength=vocab_size)
    return total


def specialization(
    ids: Ids, tokens: Ids, num_experts: int, vocab_size: int, *, min_count: int = 100
) -> Floats:
    """Returns the share of each token id's occurrences that go to each expert [E, V].

    NaN for ids that occur less than `min_count` times, whose shares are mostly chance.

    Args:
        ids: Expert ids [N, K].
        tokens: Token ids [N], of the same tokens.
        num_experts: E.
        vocab_size: V.
        min_count: Number of occurrences from which a share is defined.

    Raises:
        ValueError: If the axes of the two arrays are not of the same tokens.
    """
    if ids.ndim != 2 or tokens.shape != ids.shape[:1]:
        raise ValueError(f"ids {ids.shape} and tokens {tokens.shape}: pass [N, K] and [N].")
    active = np.zeros((num_experts + 1) * vocab_size, np.int64)
    for part, of_part in _chunks(ids, tokens, size=_LARGE_CHUNK):
        keys = part.astype(np.intp) * vocab_size + of_part[:, None]
        active += np.bincount(keys.ravel(), minlength=active.size)
    occurrences = token_counts(tokens, vocab_size)
    shares = active.reshape(-1, vocab_size)[:-1] / np.maximum(occurrences, 1)
    return np.where(occurrences >= min_count, shares, np.nan)


def best_tokens(shares: Floats, num: int) -> Sequence[Sequence[int]]:
    """Returns the token ids with the largest shares of each expert, at most `num`, none of 0."""
    filled = np.nan_to_num(shares, nan=0.0)
    order = np.argsort(-filled, 1, kind="stable")[:, :num]
    return [[int(t) for t in row if filled[e, t] > 0] for e, row in enumerate(order)]


def as_json(value: Any) -> Any:
    """Returns an array or number as JSON values of five digits; null if it is not finite."""
    if isinstance(value, np.ndarray):
        return [as_json(x) for x in value]
    return float(f"{value:.5g}") if math.isfinite(value) else None
