"""The pairs of a block of queries and a block of keys that a kernel visits, in order.

A kernel's grid runs over a list of visits instead of over all pairs, so a pair that no query sees
costs nothing, not even a load. For queries and keys of one sequence in order, the list is known
when the kernel is built; for shards in any order it is computed on the device: it has all pairs,
but a pair that is not seen names the block that is loaded already.

A visit is one int32: row, column, and four flags. The kernel sums over the visits of a row: rows
are blocks of queries for the output, blocks of keys for the gradients of keys and values.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from moelib.kernels.flash_attention.reference import MaskSpec

PAST_END = 2**30  # Position of keys that only pad the last block: behind every query.
MAX_VISITS = 9 * 2**14  # 4 bytes each, in a scalar memory of 1 MiB.
_BITS = 13  # Bits of a row and of a column.
MAX_BLOCKS = 2**_BITS
_NOT_CAUSAL = -(2**29)  # Without causality a query sees keys this far ahead, but not PAST_END.


def row(visit: Any) -> Any:
    """Returns the index of the block that is summed over."""
    return visit & (2**_BITS - 1)


def column(visit: Any) -> Any:
    """Returns the index of the block that changes with each visit."""
    return (visit >> _BITS) & (2**_BITS - 1)


def is_first(visit: Any) -> Any:
    """Returns whether the visit is the first of its row."""
    return _flag(visit, 0)


def is_last(visit: Any) -> Any:
    """Returns whether the visit is the last of its row."""
    return _flag(visit, 1)


def is_seen(visit: Any) -> Any:
    """Returns whether any query of the visit may see any of its keys."""
    return _flag(visit, 2)


def is_whole(visit: Any) -> Any:
    """Returns whether each query of the visit sees each of its keys, segments aside."""
    return _flag(visit, 3)


def least_ahead(spec: MaskSpec) -> int:
    """Returns the least distance by which a query is ahead of the keys that it sees."""
    return 0 if spec.causal else _NOT_CAUSAL


def visits(q_index: Any, k_index: Any, spec: MaskSpec, *, by_keys: bool) -> Any:
    """Returns the list of visits, int32 [V], row by row; each row has one visit at least.

    NumPy arrays give a NumPy list of the seen pairs only, JAX arrays a list of all pairs. Positions
    are [blocks, tokens of a block]. With `by_keys`, rows are blocks of keys.
    """
    seen, whole = _seen_and_whole(q_index, k_index, spec)
    if by_keys:
        seen, whole = seen.T, whole.T
    rows, columns = seen.shape
    assert max(rows, columns) <= MAX_BLOCKS, (rows, columns)
    static = isinstance(seen, np.ndarray)
    xp: Any = np if static else jnp
    at_row = xp.broadcast_to(xp.arange(rows, dtype=xp.int32)[:, None], seen.shape)
    at_column = xp.broadcast_to(xp.arange(columns, dtype=xp.int32)[None], seen.shape)
    if static:
        kept = seen.copy()
        kept[:, 0] |= ~seen.any(1)  # An empty row's zeros must be written too.
        ends = at_column == kept.argmax(1)[:, None], at_column == _last(kept)[:, None]
        return _pack(at_row, at_column, *ends, seen, whole)[kept].astype(np.int32)
    loaded = jnp.where(seen, at_column, -1)
    loaded = jnp.maximum.accumulate(loaded, axis=1)  # Unseen ones after, and first ones, wait.
    loaded = jnp.where(loaded < 0, jnp.argmax(seen, axis=1)[:, None].astype(jnp.int32), loaded)
    ends = at_column == 0, at_column == columns - 1
    return _pack(at_row, loaded, *ends, seen, whole).reshape(-1)


def lists(
    q_index: Any, k_index: Any, segments: tuple[Any, Any] | None, spec: MaskSpec, *, by_keys: bool
) -> tuple[Any, Any]:
    """Returns the columns that each row visits, int32 [b, rows, columns], and their numbers.

    A visit is 2 * column, plus 1 if it is whole; visits past a row's number are undefined. Segments
    of queries and keys are [B, blocks, tokens of a block]; a pair of blocks whose ranges of segment
    ids are disjoint is not visited. Without them b is 1, and NumPy arrays give NumPy arrays.
    """
    seen, whole = (x[None] for x in _seen_and_whole(q_index, k_index, spec))
    if segments is not None:
        (q_low, q_high), (k_low, k_high) = ((x.min(2), x.max(2)) for x in segments)
        low, high = q_low[:, :, None], q_high[:, :, None]
        k_low, k_high = k_low[:, None], k_high[:, None]
        seen = seen & (low <= k_high) & (k_low <= high)
        whole = whole & (low == k_high) & (k_low == high)
    if by_keys:
        seen, whole = seen.swapaxes(1, 2), whole.swapaxes(1, 2)
    xp: Any = np if isinstance(seen, np.ndarray) else jnp
    column = xp.arange(seen.shape[2], dtype=xp.int32)[None, None]
    found = xp.where(seen, 2 * column + whole.astype(xp.int32), 2 * seen.shape[2])
    return xp.sort(found, axis=2).astype(xp.int32), seen.sum(2, dtype=xp.int32)


def in_blocks(q_index: Any, k_index: Any, block_q: int, block_k: int) -> tuple[Any, Any]:
    """Returns the positions by block, padded; NumPy arrays give NumPy arrays."""
    xp: Any = np if isinstance(q_index, np.ndarray) else jnp
    pad = lambda x, block: (0, -x.shape[0] % block)
    q_index = xp.pad(q_index, pad(q_index, block_q), mode="edge")
    k_index = xp.pad(k_index, pad(k_index, block_k), constant_values=PAST_END)
    rows = q_index.reshape(-1, block_q), k_index.reshape(-1, block_k)
    return rows[0].astype(np.int32), rows[1].astype(np.int32)


def _seen_and_whole(q_index: Any, k_index: Any, spec: MaskSpec) -> tuple[Any, Any]:
    """Returns the flags of each pair of blocks, [blocks of queries, blocks of keys]."""
    q_low, q_high = q_index.min(1)[:, None], q_index.max(1)[:, None]
    k_low, k_high = k_index.min(1)[None], k_index.max(1)[None]
    least = least_ahead(spec)
    seen, whole = q_high - k_low >= least, q_low - k_high >= least
    if spec.window is not None:
        seen = seen & (q_low - k_high < spec.window)
        whole = whole & (q_high - k_low < spec.window)
    return seen, whole


def _pack(at_row: Any, at_column: Any, *flags: Any) -> Any:
    packed = at_row | (at_column << _BITS)
    for bit, flag in enumerate(flags):
        packed = packed | (flag.astype(packed.dtype) << (2 * _BITS + bit))
    return packed


def _flag(visit: Any, bit: int) -> Any:
    return ((visit >> (2 * _BITS + bit)) & 1) == 1


def _last(kept: np.ndarray) -> np.ndarray:
    return kept.shape[1] - 1 - kept[:, ::-1].argmax(1)
