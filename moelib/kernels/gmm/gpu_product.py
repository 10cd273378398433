"""The Hopper GPU's kernel of the grouped matmul: rows times their group's matrices.

How such a kernel works is told in `gpu_blocks`; which rows it visits, in `gpu_visits`.

Shapes: m rows, k in, n out, g groups held, s groups counted.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moelib.kernels.gmm.gpu_blocks import (
    Ring,
    launch,
    operand,
    own_tiles,
    rows_within,
    split_roles,
    store,
)
from moelib.kernels.gmm.gpu_tiles import SIDE, GpuTiles
from moelib.kernels.gmm.gpu_visits import ALIGNED_ROWS, row_visits
from moelib.kernels.gmm.groups import row_ranges

_PANEL = 8  # Tiles of columns that are visited together, so that rows and matrices stay in L2.


def product(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "g ..."],
    group_sizes: Int[Array, "s"],
    bias: Float[Array, "g n"] | None,
    group_offset: Int[Array, ""] | None,
    *,
    transpose_rhs: bool,
    out_dtype: DTypeLike,
    tiles: GpuTiles,
    num_blocks: int,
    interpret: Any,
) -> Float[Array, "m n"]:
    """Returns `lhs[i] @ rhs[group of row i]` plus its bias, zeros for rows of no group held.

    Args:
        lhs: The rows, sorted by group, in bfloat16 or float16: a multiple of 8 rows, and k of 64.
        rhs: A matrix for each group held, [g, k, n]; [g, n, k] if `transpose_rhs`. So is n.
        group_sizes: Number of rows of each group.
        bias: A vector for each group held.
        group_offset: The first group held; 0 by default.
        transpose_rhs: Whether to multiply by the transposes.
        out_dtype: Dtype of the result.
        tiles: Its tiles.
        num_blocks: Number of blocks of threads, one for each SM.
        interpret: What `plgpu.kernel` is given.
    """
    (m, k), num_groups = lhs.shape, rhs.shape[0]
    n = rhs.shape[1 if transpose_rhs else 2]
    tiles_n = pl.cdiv(n, tiles.n)
    starts, ends = row_ranges(group_sizes, m, num_groups, group_offset)
    visits, num_visits = row_visits(starts, ends, m, tiles.m)
    biases = []
    if bias is not None:  # Read without the copy engine, so nothing may lie past its end.
        past = tiles_n * tiles.n - n
        biases.append(jnp.pad(bias.astype(jnp.float32), ((0, 1), (0, past))))  # Last: no group's.
    kernel = _Kernel(tiles, pl.cdiv(k, SIDE), tiles_n, num_blocks, transpose_rhs)
    block = (tiles.stages, tiles.n, SIDE) if transpose_rhs else (tiles.stages, SIDE, tiles.n)
    written = m * n * jnp.dtype(out_dtype).itemsize
    return launch(
        kernel,
        *visits,
        num_visits,
        lhs,
        rhs,
        *biases,
        out=jax.ShapeDtypeStruct((m, n), out_dtype),
        left=operand((tiles.stages, tiles.halves, SIDE, SIDE), lhs.dtype),
        right=operand(block, rhs.dtype),
        stages=tiles.stages,
        num_copies=tiles.halves + 1,
        num_blocks=num_blocks,
        flops=2 * m * k * n,
        bytes_accessed=2 * (m * k + num_groups * k * n) + written,
        interpret=interpret,
    )


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """The kernel: what is fixed when it is compiled."""

    tiles: GpuTiles
    steps: int  # Of one product.
    tiles_n: int
    num_blocks: int
    transpose_rhs: bool

    # Pallas names a kernel after its function.
    __name__ = "gmm"

    def __call__(self, *refs: Any, **scratch: Any) -> None:
        block = _Block(self, *refs, **scratch)
        split_roles(block.load, block.multiply)


class _Block:
    """What one block of threads does, as its three warpgroups see it."""

    def __init__(self, kernel: _Kernel, *refs: Any, left: Any, right: Any, slots: Any, **ring: Any):
        *self.visits, num_visits, self.lhs, self.rhs = refs[:7]
        *self.biases, self.out = refs[7:]
        self.left, self.right, self.slots = left, right, slots
        self.kernel = kernel
        self.ring = Ring(kernel.tiles.stages, **ring)
        self.shape = num_visits[0], kernel.tiles_n
        self.index, self.num_tiles = own_tiles(self.shape[0] * self.shape[1], kernel.num_blocks)

    def place(self, i: Array) -> tuple[Array, Array, Array]:
        """Returns (visit, tile of columns, number of steps) of this block's i-th tile."""
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
        visit, column, count = self.place(i)
        tiles = self.kernel.tiles

        def copy(i: Array, slot: Array, barrier: Any) -> None:
            ks, columns = pl.ds(i * SIDE, SIDE), pl.ds(column * tiles.n, tiles.n)
            for half in range(tiles.halves):
                rows = self.lhs.at[pl.ds(self.first_row(visit, half), SIDE), ks]
                plgpu.copy_gmem_to_smem(rows, self.left.at[slot, half], barrier)
            at = (columns, ks) if self.kernel.transpose_rhs else (ks, columns)
            matrix = self.rhs.at[self.group(visit), *at]
            plgpu.copy_gmem_to_smem(matrix, self.right.at[slot], barrier)

        return self.ring.load(step, count, copy)

    def multiply(self, warpgroup: Array) -> None:
        """Multiplies and writes this warpgroup's part of all tiles."""
        tiles = self.kernel.tiles
        shared = tiles.halves == 1  # The rows are; each takes its own columns.
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
            visit, column, count = self.place(i)
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
