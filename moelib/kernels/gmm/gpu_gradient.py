"""The Hopper GPU's kernel of the grouped matmul's weight gradient: rows times rows, by group.

`moelib.kernels.hopper_pipeline` explains how such a kernel works. Here a step takes 64 rows, from
the multiple of 8 at or before the group's first row on. In the first step and the last one, rows of
other groups are replaced by zeros in shared memory, on both sides, because a NaN among them times
zero is NaN.

Shapes: m rows, k and n sides of the result, g groups, p matrices per group.
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


def weight_gradient(
    lhs: Float[Array, "m k"],
    grads: tuple[Float[Array, "m n"], ...],
    group_sizes: Int[Array, "g"],
    *,
    out_dtype: DTypeLike,
    tiles: GpuTiles,
    num_blocks: int,
    interpret: Any,
) -> Float[Array, "g p k n"]:
    """Returns the sums of `lhs[i]^T grads[p][i]` over the rows i of each group.

    Operands are bfloat16 or float16; m is a multiple of 8, k and n are multiples of 64. There are
    `num_blocks` blocks of threads, one per SM.
    """
    (m, k), n, num_groups, parts = lhs.shape, grads[0].shape[1], len(group_sizes), len(grads)
    starts, ends = row_ranges(group_sizes, m)
    kernel = _Kernel(tiles, num_groups, pl.cdiv(k, tiles.m), parts, pl.cdiv(n, tiles.n), num_blocks)
    written = num_groups * parts * k * n * jnp.dtype(out_dtype).itemsize
    return launch(
        kernel,
        starts,
        ends,
        lhs,
        *grads,
        out=jax.ShapeDtypeStruct((num_groups, parts, k, n), out_dtype),
        left=operand((tiles.stages, 2, SIDE, SIDE), lhs.dtype),
        right=operand((tiles.stages, SIDE, tiles.n), lhs.dtype),
        masked=plgpu.Barrier(num_arrivals=2),
        stages=tiles.stages,
        num_copies=3,
        num_blocks=num_blocks,
        flops=2 * parts * m * k * n,
        bytes_accessed=2 * m * (k + parts * n) + written,
        interpret=interpret,
    )


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """The kernel, with its compile-time constants."""

    tiles: GpuTiles
    num_groups: int
    tiles_k: int
    parts: int
    tiles_n: int  # Tiles of columns of each part.
    num_blocks: int

    # Pallas names a kernel after its function.
    __name__ = "gmm_weight_gradient"

    def __call__(self, *refs: Any, **scratch: Any) -> None:
        block = _Block(self, *refs, **scratch)
        split_roles(block.load, block.multiply)


class _Block:
    """The work of one block of threads, as its three warpgroups see it."""

    def __init__(
        self,
        kernel: _Kernel,
        *refs: Any,
        left: Any,
        right: Any,
        slots: Any,
        masked: Any,
        **ring: Any,
    ):
        self.starts, self.ends, self.lhs, *self.grads, self.out = refs
        self.left, self.right, self.slots, self.masked = left, right, slots, masked
        self.kernel = kernel
        self.ring = Ring(kernel.tiles.stages, **ring)
        num_tiles = kernel.num_groups * kernel.tiles_k * kernel.parts * kernel.tiles_n
        self.index, self.num_tiles = own_tiles(num_tiles, kernel.num_blocks)

    def tile_at(self, i: Array) -> tuple[Array, Array, Array, Array]:
        """Returns (group, part, first row of the result, first column) of this block's i-th tile.

        Tiles of the same rows of the result, in all parts, follow each other: lhs stays in L2.
        """
        kernel = self.kernel
        at = i * kernel.num_blocks + self.index
        rest, column = lax.div(at, kernel.tiles_n), lax.rem(at, kernel.tiles_n)
        rest, part = lax.div(rest, kernel.parts), lax.rem(rest, kernel.parts)
        group, row = lax.div(rest, kernel.tiles_k), lax.rem(rest, kernel.tiles_k)
        return group, part, row * kernel.tiles.m, column * kernel.tiles.n

    def num_steps(self, group: Array) -> Array:
        """Returns the number of steps of 64 rows of a group."""
        start, end = self.starts[group], self.ends[group]
        steps = lax.div(end - aligned(start) + (SIDE - 1), SIDE)
        return jnp.where(end > start, steps, 0)

    def first_row(self, group: Array, i: Array) -> Array:
        """Returns the first of a step's rows."""
        return pl.multiple_of(aligned(self.starts[group]) + i * SIDE, ALIGNED_ROWS)

    def load(self) -> None:
        """Loads the operands of all tiles."""
        self.ring.drain(lax.fori_loop(0, self.num_tiles, self._load_tile, jnp.int32(0)))

    def _load_tile(self, i: Array, step: Array) -> Array:
        group, part, row, column = self.tile_at(i)

        def copy(i: Array, slot: Array, barrier: Any) -> None:
            rows = pl.ds(self.first_row(group, i), SIDE)
            for half in range(2):
                left = self.lhs.at[rows, pl.ds(row + half * SIDE, SIDE)]
                plgpu.copy_gmem_to_smem(left, self.left.at[slot, half], barrier)
            for j, grad in enumerate(self.grads):

                @pl.when(part == j)
                def _(grad: Any = grad) -> None:
                    right = grad.at[rows, pl.ds(column, self.kernel.tiles.n)]
                    plgpu.copy_gmem_to_smem(right, self.right.at[slot], barrier)

        return self.ring.load(step, self.num_steps(group), copy)

    def multiply(self, warpgroup: Array) -> None:
        """Multiplies and writes this warpgroup's 64 rows of all tiles."""

        def tile(i: Array, step: Array) -> Array:
            group, part, row, column = self.tile_at(i)

            def blocks(i: Array, slot: Array) -> tuple[Any, Any]:
                own = rows_within(self.first_row(group, i), self.starts[group], self.ends[group])

                @pl.when(own[1] - own[0] < SIDE)
                def _() -> None:
                    self._mask(warpgroup, slot, own)

                return self.left.at[slot, warpgroup].transpose((1, 0)), self.right.at[slot]

            count = self.num_steps(group)
            value = self.ring.multiply(step, count, (SIDE, self.kernel.tiles.n), blocks)
            first = row + warpgroup * SIDE
            store(value, self.slots.at[warpgroup], self.out.at[group, part], first, column, None)
            return step + count

        lax.fori_loop(0, self.num_tiles, tile, jnp.int32(0))

    def _mask(self, warpgroup: Array, slot: Array, own: tuple[Array, Array]) -> None:
        """Clears the rows that are not the group's.

        Each warpgroup clears its half of lhs and every other 64 columns of grad, all of which both
        read: so each waits for the other.
        """
        _clear(self.left.at[slot, warpgroup], own)
        for j in range(self.kernel.tiles.n // SIDE):

            @pl.when(warpgroup == j % 2)
            def _(j: int = j) -> None:
                _clear(self.right.at[slot, :, pl.ds(j * SIDE, SIDE)], own)

        plgpu.commit_smem()
        plgpu.barrier_arrive(self.masked)
        plgpu.barrier_wait(self.masked)


def _clear(block: Any, own: tuple[Array, Array]) -> None:
    """Writes zeros to a block's rows outside own[0] to own[1]."""
    value = plgpu.load(block, layout=plgpu.Layout.WGMMA)
    row = plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=plgpu.Layout.WGMMA)
    block[...] = jnp.where((row >= own[0]) & (row < own[1]), value, jnp.zeros_like(value))
