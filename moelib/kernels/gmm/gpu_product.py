"""The Hopper GPU's kernel of the grouped matmul: rows times their group's matrices.

`moelib.kernels.hopper_pipeline` explains how such a kernel works. It visits windows of rows. A
group's windows begin at the multiple of 8 at or before its first row, where the copy engine can
begin a block for the tensor cores. So a group visits few rows that are not its own: 3.5 on average
before its first, and half a window after its last.

Shapes: m rows, k in, n out, g groups, p matrices per group, v visits.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int32

from moelib.kernels.gmm.gpu_tiles import GpuTiles
from moelib.kernels.gmm.groups import row_ranges
from moelib.kernels.hopper import SIDE
from moelib.kernels.hopper_pipeline import (
    ALIGNED_ROWS,
    Ring,
    aligned,
    launch,
    operand,
    own_tiles,
    rows_within,
    split_roles,
    store,
)

_PANEL = 8  # Tiles of columns that are visited together, so that rows and matrices stay in L2.


class RowVisits(NamedTuple):
    """The work of each visit of a kernel to a window; undefined past the number of visits."""

    group: Int32[Array, "v"]  # -1 for rows of no group, which become zeros.
    row: Int32[Array, "v"]  # First row of the window, a multiple of 8.
    start: Int32[Array, "v"]  # First row of the group.
    end: Int32[Array, "v"]  # Row after its last.


def row_visits(
    starts: Int32[Array, "g"], ends: Int32[Array, "g"], num_rows: int, window: int
) -> tuple[RowVisits, Int32[Array, "1"]]:
    """Returns visits, each of which writes a group's rows in a window, and their number.

    Each row is written in one visit: its group's, or one of no group. `starts` and `ends` are those
    of `row_ranges`; a window has 64 rows or more.
    """
    num_groups = len(starts)
    # The rows after the last group are one more range, of no group.
    none = jnp.full_like(starts, -1, shape=(1,))
    group = jnp.concatenate([lax.iota(jnp.int32, num_groups), none])
    first = jnp.concatenate([starts, ends[-1:]])
    after = jnp.concatenate([ends, jnp.full_like(none, num_rows)])
    low = aligned(first)
    counts = lax.div(after - low + (window - 1), jnp.full_like(low, window))
    counts = jnp.where(after > first, counts, 0)
    done = jnp.cumsum(counts, dtype=jnp.int32)
    before = done - counts
    # A range of r rows has at most (r + 7 + window - 1) / window windows.
    step = lax.iota(jnp.int32, num_rows // window + (num_groups + 1) * 9 // 8 + 1)
    mine = (step[:, None] >= before[None]) & (step[:, None] < done[None])  # [v, g + 1]

    def of_range(values: Array) -> Array:
        return jnp.sum(jnp.where(mine, values[None], 0), axis=1, dtype=jnp.int32)

    row = of_range(low - before * window) + step * window
    return RowVisits(of_range(group), row, of_range(first), of_range(after)), done[-1:]


def product(
    lhs: tuple[Float[Array, "m k"], ...],
    rhs: Float[Array, "g p ..."],
    group_sizes: Int[Array, "g"],
    bias: Float[Array, "g n"] | None,
    *,
    first_part: int,
    transpose_rhs: bool,
    out_dtype: DTypeLike,
    tiles: GpuTiles,
    num_blocks: int,
    interpret: Any,
) -> Float[Array, "m n"]:
    """Returns the sum over j of `lhs[j][i] @ rhs[group of row i, first_part + j]`, plus its bias.

    Rows of no group are zeros. With `transpose_rhs` it multiplies by the transposes of the matrices
    [g, p, n, k]. Operands are bfloat16 or float16; m is a multiple of 8, k and n are multiples of
    64. There are `num_blocks` blocks of threads, one per SM.
    """
    (m, k), num_groups, parts = lhs[0].shape, rhs.shape[0], len(lhs)
    n = rhs.shape[2 if transpose_rhs else 3]
    tiles_n = pl.cdiv(n, tiles.n)
    visits, num_visits = row_visits(*row_ranges(group_sizes, m), m, tiles.m)
    biases = []
    if bias is not None:  # Read without the copy engine, so reads must not pass its end.
        past = tiles_n * tiles.n - n
        biases.append(jnp.pad(bias.astype(jnp.float32), ((0, 1), (0, past))))  # Last: no group's.
    kernel = _Kernel(tiles, parts, first_part, pl.cdiv(k, SIDE), tiles_n, num_blocks, transpose_rhs)
    block = (tiles.stages, tiles.n, SIDE) if transpose_rhs else (tiles.stages, SIDE, tiles.n)
    written = m * n * jnp.dtype(out_dtype).itemsize
    return launch(
        kernel,
        *visits,
        num_visits,
        rhs,
        *lhs,
        *biases,
        out=jax.ShapeDtypeStruct((m, n), out_dtype),
        left=operand((tiles.stages, tiles.halves, SIDE, SIDE), rhs.dtype),
        right=operand(block, rhs.dtype),
        stages=tiles.stages,
        num_copies=tiles.halves + 1,
        num_blocks=num_blocks,
        flops=2 * parts * m * k * n,
        bytes_accessed=2 * parts * (m * k + num_groups * k * n) + written,
        interpret=interpret,
    )


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """The kernel, with its compile-time constants."""

    tiles: GpuTiles
    parts: int  # Number of products that are summed.
    first_part: int  # Index, among the matrices of each group, of the first one that is multiplied.
    steps: int  # Steps of 64 columns of lhs, per product.
    tiles_n: int
    num_blocks: int
    transpose_rhs: bool

    # Pallas names a kernel after its function.
    __name__ = "gmm"

    def __call__(self, *refs: Any, **scratch: Any) -> None:
        block = _Block(self, *refs, **scratch)
        split_roles(block.load, block.multiply)


class _Block:
    """The work of one block of threads, as its three warpgroups see it."""

    def __init__(self, kernel: _Kernel, *refs: Any, left: Any, right: Any, slots: Any, **ring: Any):
        (*self.visits, num_visits, self.rhs), refs = refs[:6], refs[6:]
        self.lhs, (*self.biases, self.out) = refs[: kernel.parts], refs[kernel.parts :]
        self.left, self.right, self.slots = left, right, slots
        self.kernel = kernel
        self.ring = Ring(kernel.tiles.stages, **ring)
        self.shape = num_visits[0], kernel.tiles_n
        self.index, self.num_tiles = own_tiles(self.shape[0] * self.shape[1], kernel.num_blocks)

    def tile_at(self, i: Array) -> tuple[Array, Array, Array]:
        """Returns (visit, tile of columns, steps per product) of this block's i-th tile."""
        at = i * self.kernel.num_blocks + self.index
        visit, column = plgpu.planar_snake(at, self.shape, 1, min(self.kernel.tiles_n, _PANEL))
        return visit, column, jnp.where(self.group(visit) < 0, 0, self.kernel.steps)

    def group(self, visit: Array) -> Array:
        """Returns its group; -1 for none."""
        return self.visits[0][visit]

    def first_row(self, visit: Array, half: Any) -> Array:
        """Returns the first of the 64 rows of a warpgroup."""
        return pl.multiple_of(self.visits[1][visit] + half * SIDE, ALIGNED_ROWS)

    def load(self) -> None:
        """Loads the operands of all tiles."""
        self.ring.drain(lax.fori_loop(0, self.num_tiles, self._load_tile, jnp.int32(0)))

    def _load_tile(self, i: Array, step: Array) -> Array:
        visit, column, count = self.tile_at(i)
        tiles = self.kernel.tiles

        def copy(part: int, i: Array, slot: Array, barrier: Any) -> None:
            ks, columns = pl.ds(i * SIDE, SIDE), pl.ds(column * tiles.n, tiles.n)
            for half in range(tiles.halves):
                rows = self.lhs[part].at[pl.ds(self.first_row(visit, half), SIDE), ks]
                plgpu.copy_gmem_to_smem(rows, self.left.at[slot, half], barrier)
            at = (columns, ks) if self.kernel.transpose_rhs else (ks, columns)
            matrix = self.rhs.at[self.group(visit), self.kernel.first_part + part, *at]
            plgpu.copy_gmem_to_smem(matrix, self.right.at[slot], barrier)

        for part in range(self.kernel.parts):
            step = self.ring.load(step, count, functools.partial(copy, part))
        return step

    def multiply(self, warpgroup: Array) -> None:
        """Multiplies and writes this warpgroup's part of all tiles."""
        tiles = self.kernel.tiles
        shared = tiles.halves == 1  # Both take the same rows, and each its own columns.
        half: Any = 0 if shared else warpgroup
        offset: Any = pl.multiple_of(warpgroup * tiles.wide, SIDE) if shared else 0

        def blocks(i: Array, slot: Array) -> tuple[Any, Any]:
            del i
            columns = pl.ds(offset, tiles.wide)
            if self.kernel.transpose_rhs:
                right = self.right.at[slot, columns].transpose((1, 0))
            else:
                right = self.right.at[slot, :, columns]
            return self.left.at[slot, half], right

        def tile(i: Array, step: Array) -> Array:
            visit, column, count = self.tile_at(i)
            count *= self.kernel.parts
            value = self.ring.multiply(step, count, (SIDE, tiles.wide), blocks)
            first = column * tiles.n + offset
            if self.biases:
                value += self._bias(self.group(visit), first)
            row = self.first_row(visit, half)
            own = rows_within(row, self.visits[2][visit], self.visits[3][visit])

            @pl.when(own[0] < own[1])
            def _() -> None:
                store(value, self.slots.at[warpgroup], self.out, row, first, own)

            return step + count

        lax.fori_loop(0, self.num_tiles, tile, jnp.int32(0))

    def _bias(self, group: Array, first: Array) -> Array:
        """Returns the group's bias in every row; zeros for no group."""
        bias, wide = self.biases[0], self.kernel.tiles.wide
        own = bias.at[jnp.where(group < 0, bias.shape[0] - 1, group), pl.ds(first, wide)]
        own = plgpu.load(own, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
        return lax.broadcast_in_dim(own, (SIDE, wide), (1,))
