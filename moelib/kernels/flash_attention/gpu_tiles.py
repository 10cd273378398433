"""Tiles of the Hopper GPU's kernels of attention, and the visits between them."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32

from moelib.kernels.flash_attention.reference import MaskSpec, Positions
from moelib.kernels.flash_attention.visits import in_blocks, lists
from moelib.kernels.hopper import SMEM_BYTES

_SPARE_BYTES = 2048  # Of shared memory, for barriers and the sums of outputs.
_OUT_BYTES = 2**15  # Of shared memory, through which results leave.
_MAX_STAGES = 4


class Tiles(NamedTuple):
    """Sizes of the blocks of one block of threads."""

    rows: int  # 128, or 64 if both warpgroups take the same ones.
    columns: int  # Of a visit.
    stages: int  # Visits that are loaded, or in flight, at a time.


class Call(NamedTuple):
    """Static arguments of all kernels."""

    spec: MaskSpec
    tiles: Tiles
    num_visits: int  # At most, of all rows of one head and sequence; for the cost estimate.
    interpret: Any  # As for `plgpu.kernel`.


class Visited(NamedTuple):
    """The columns that rows visit, and what masks them, padded to whole tiles."""

    columns: Int32[Array, "b rows columns"]  # As `visits.lists` returns them.
    counts: Int32[Array, "b rows"]
    q_index: Int32[Array, "Q"]
    k_index: Int32[Array, "K"]
    q_segments: Int32[Array, "B Q"] | None
    k_segments: Int32[Array, "B K"] | None


@functools.cache
def choose(kernel: str, dim: int, v_dim: int) -> Tiles:
    """Returns the tiles of `outputs`, `query_gradient` or `key_gradients`.

    A thread has 240 registers, and 64 rows by c columns in float32 take c / 2 of them. Outputs need
    dim + c columns, and half of c again in 16 bits; gradients dim + 2 c, those of keys and values
    2 dim + 2 c. Shared memory holds the rows, and the columns of as many stages as fit.
    """
    wide, both = max(dim, v_dim), 2 * (dim + v_dim)
    rows = 64 if kernel == "key_gradients" and wide > 128 else 128
    columns = 128 if kernel == "outputs" and wide <= 128 else 64
    held = rows * (2 * dim if kernel == "outputs" else both)
    left = SMEM_BYTES - _SPARE_BYTES - _OUT_BYTES - held
    return Tiles(rows, columns, min(_MAX_STAGES, left // (columns * (both + 8))))


def visits_of(
    kernel: str,
    dims: tuple[int, int],
    positions: Positions,
    spec: MaskSpec,
    *,
    in_order: bool,
    interpret: Any,
) -> tuple[Call, Visited]:
    """Returns a kernel's static arguments and visits, for head dimensions of keys and values."""
    tiles, by_keys = choose(kernel, *dims), kernel == "key_gradients"
    sizes = (tiles.columns, tiles.rows) if by_keys else (tiles.rows, tiles.columns)
    segments: Any = (positions.q_segments, positions.k_segments)
    q_index, k_index = positions.q_index, positions.k_index
    if in_order:  # Known while tracing.
        q_index = k_index = np.arange(q_index.shape[0], dtype=np.int32)
    blocks = in_blocks(q_index, k_index, *sizes)
    num_visits = blocks[0].shape[0] * blocks[1].shape[0]
    if in_order:
        num_visits = int(lists(*blocks, None, spec, by_keys=by_keys)[1].sum())
    ids: Any = None
    if segments[0] is not None:
        ids = tuple(map(_segments_in_blocks, segments, sizes))
    found = lists(*blocks, ids, spec, by_keys=by_keys)
    flat = (None, None) if ids is None else (x.reshape(x.shape[0], -1) for x in ids)
    visited = Visited(*map(jnp.asarray, (*found, *(x.reshape(-1) for x in blocks))), *flat)
    return Call(spec, tiles, num_visits, interpret), visited


def _segments_in_blocks(ids: Int[Array, "B S"], block: int) -> Int32[Array, "B n block"]:
    """Returns segments by block; the last one goes on past the end, where positions mask."""
    ids = jnp.pad(ids.astype(jnp.int32), ((0, 0), (0, -ids.shape[1] % block)), mode="edge")
    return ids.reshape(ids.shape[0], -1, block)
