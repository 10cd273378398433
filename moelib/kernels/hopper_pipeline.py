"""Pipeline and stores that the kernels for Hopper GPUs share.

How these kernels work, for a reader who knows Pallas but not Mosaic-GPU. The grid of the grouped
matmul has one block of threads per SM, and each block walks over tiles of the result
("persistent"); that of attention has one block per tile. A block has three warpgroups of 128
threads, the axis "wg", which run the same code but branch on their index:

- Warpgroup 2 only loads. `copy_gmem_to_smem` starts the copy engine (TMA), which asynchronously
  fetches a box of an array into shared memory (SMEM), fills the part outside the array with zeros,
  and arrives at a barrier when it is done.
- Warpgroups 0 and 1 multiply. `wgmma` makes the tensor cores multiply two blocks in SMEM and add
  the product to an accumulator in the registers of the warpgroup's threads. It is asynchronous
  too; after `wgmma_wait(1)`, all but the last one are done.

Between them is a ring of slots in SMEM, the stages. Each slot has two barriers: `full`, at which
the copies arrive and for which the multipliers wait, and `free`, the other way around. The steps of
all tiles share one ring, so the loads for the next tile begin while the current one is written.

A product leaves from registers through a small slot in SMEM, by another copy, which overlaps the
conversion of the next columns (after `wait_smem_to_gmem(1)`, all but the last have been read).

"Transforms" describe the layout of a block in SMEM: columns of 128 bytes, in which the sixteen-byte
pieces of each row are permuted ("swizzled"), so that tensor cores and stores avoid bank conflicts.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array

from moelib.kernels.hopper import ROW_BYTES, SIDE

ALIGNED_ROWS = 8  # A block that the copy engine loads begins at a multiple of them.
_NUM_SLOTS = 2  # Per warpgroup, through which results leave.
_LOADER_REGISTERS = 24  # Per thread; the two other warpgroups share the rest of 504.
_MULTIPLIER_REGISTERS = 240


def aligned(rows: Array) -> Array:
    """Returns the multiples of 8 at or before rows."""
    return rows - lax.rem(rows, jnp.full_like(rows, ALIGNED_ROWS))


def operand(shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    """Returns SMEM for operands of `wgmma`."""
    return plgpu.SMEM(shape, dtype, transforms=_transforms(8, dtype))


def out_slots(dtype: DTypeLike) -> Any:
    """Returns SMEM through which results leave; any rows of its slots can be copied.

    Its layout is that of an operand, except that a tile of rows is one row.
    """
    columns = ROW_BYTES // jnp.dtype(dtype).itemsize
    return plgpu.SMEM((2, _NUM_SLOTS, SIDE, columns), dtype, transforms=_transforms(1, dtype))


def _transforms(rows: int, dtype: DTypeLike) -> tuple[Any, ...]:
    columns = ROW_BYTES // jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((rows, columns)), plgpu.SwizzleTransform(ROW_BYTES)


def launch(
    kernel: Callable[..., None],
    *inputs: Array,
    out: jax.ShapeDtypeStruct,
    stages: int,
    num_copies: int,
    num_blocks: int,
    flops: int,
    bytes_accessed: int,
    interpret: Any,
    **scratch: Any,
) -> Array:
    """Returns the result of a kernel, which runs in `num_blocks` blocks of threads, one per SM.

    The kernel is a function of the inputs and the result, arrays in the GPU's memory, and by name
    of `scratch`, the `slots` through which results leave, and the barriers of the ring, `full` and
    `free`. The ring has `stages` slots, each of which `num_copies` copies fill.
    """
    scratch |= {
        "slots": out_slots(out.dtype),
        "full": plgpu.Barrier(num_arrivals=num_copies, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
    }
    cost = pl.CostEstimate(flops=flops, bytes_accessed=bytes_accessed, transcendentals=0)
    run = plgpu.kernel(
        kernel,
        out_type=out,
        scratch_types=scratch,
        grid=(num_blocks,),
        grid_names=("sm",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0),
        cost_estimate=cost,
        interpret=interpret,
    )
    return run(*inputs)


def own_tiles(num_tiles: Any, num_blocks: int) -> tuple[Array, Array]:
    """Returns (this block's index, number of its tiles: every `num_blocks`-th of all)."""
    index = lax.axis_index("sm")
    return index, lax.div(num_tiles - index + num_blocks - 1, num_blocks)


def split_roles(load: Callable[[], None], multiply: Callable[[Array], None]) -> None:
    """Runs `multiply(0)`, `multiply(1)` and `load()` in three warpgroups."""
    warpgroup = lax.axis_index("wg")

    def multiplier() -> None:
        plgpu.set_max_registers(_MULTIPLIER_REGISTERS, action="increase")
        multiply(warpgroup)
        plgpu.wait_smem_to_gmem(0)

    def loader() -> None:
        plgpu.set_max_registers(_LOADER_REGISTERS, action="decrease")
        load()

    lax.cond(warpgroup < 2, multiplier, loader)


class Ring:
    """The stages, as the loader and the multipliers see them. Steps count over all tiles."""

    def __init__(self, stages: int, full: Any, free: Any):
        self.stages = stages
        self.full = full
        self.free = free

    def slot(self, step: Array) -> Array:
        """Returns the step's slot."""
        return lax.rem(step, jnp.int32(self.stages))

    def load(self, first: Array, count: Array, copy: Callable[[Array, Array, Any], None]) -> Array:
        """Runs `copy(i, slot, barrier)` for a tile's steps when their slots are free.

        Returns the step after the last.
        """

        def one(i: Array, _: None) -> None:
            slot = self.acquire(first + i)
            copy(i, slot, self.full.at[slot])

        lax.fori_loop(0, count, one, None)
        return first + count

    def acquire(self, step: Array) -> Array:
        """Returns the step's slot when it is free to be loaded."""
        slot = self.slot(step)

        @pl.when(step >= self.stages)
        def _() -> None:
            plgpu.barrier_wait(self.free.at[slot])

        return slot

    def drain(self, end: Array) -> None:
        """Waits until all slots are free: a block of threads must leave no barrier in use."""

        def one(step: Array, _: None) -> None:
            plgpu.barrier_wait(self.free.at[self.slot(step)])

        lax.fori_loop(jnp.maximum(end - self.stages, 0), end, one, None)

    def multiply(
        self,
        first: Array,
        count: Array,
        shape: tuple[int, int],
        blocks: Callable[[Array, Array], tuple[Any, Any]],
    ) -> Array:
        """Returns the sum of the products of `blocks(i, slot)` over a tile's steps; zeros if none.

        A slot becomes free when the next product has begun, because its own is done then.
        """

        def run(total: Any) -> Array:
            def one(i: Array, _: None) -> None:
                slot = self.slot(first + i)
                plgpu.barrier_wait(self.full.at[slot])
                left, right = blocks(i, slot)
                plgpu.wgmma(total, left, right)
                plgpu.wgmma_wait(1)

                @pl.when(i > 0)
                def _() -> None:
                    plgpu.barrier_arrive(self.free.at[self.slot(first + i - 1)])

            lax.fori_loop(0, count, one, None)
            return total[...]

        value = pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))

        @pl.when(count > 0)
        def _() -> None:
            plgpu.barrier_arrive(self.free.at[self.slot(first + count - 1)])

        return value


def store(
    value: Array, slots: Any, out: Any, row: Any, column: Any, own: tuple[Array, Array] | None
) -> None:
    """Writes a block [64, columns], which begins at a row and a column of `out` [m, n].

    Columns past the last one of `out` are not written, nor rows of the block outside own[0] to
    own[1], if given. The slots are those of this warpgroup.
    """
    wide = slots.shape[-1]
    for i in range(value.shape[1] // wide):
        slot = slots.at[i % _NUM_SLOTS]
        chunk = value[:, i * wide : (i + 1) * wide].astype(out.dtype)
        # Copies of the tile before have read their slots long ago; within a tile, slots alternate.
        plgpu.wait_smem_to_gmem(_NUM_SLOTS - 1 if i else 0, wait_read_only=True)
        slot[...] = plgpu.layout_cast(chunk, plgpu.Layout.WGMMA)
        plgpu.commit_smem()
        columns = pl.ds(column + i * wide, wide)
        if own is None:
            plgpu.copy_smem_to_gmem(slot, out.at[pl.ds(row, SIDE), columns])
        else:
            _copy_rows(slot, out, row, columns, own)


def _copy_rows(slot: Any, out: Any, row: Any, columns: Any, own: tuple[Array, Array]) -> None:
    """Starts the copies of some of a slot's rows, one for each bit of their number.

    The number of rows of one copy is fixed at compile time.
    """
    at, count = own[0], own[1] - own[0]
    for size in (64, 32, 16, 8, 4, 2, 1):

        @pl.when((count & size) != 0)
        def _(size: int = size, at: Array = at) -> None:
            rows = out.at[pl.ds(row + at, size), columns]
            plgpu.copy_smem_to_gmem(slot.at[pl.ds(at, size)], rows, commit_group=False)

        at = at + (count & size)
    plgpu.commit_smem_to_gmem_group()


def rows_within(first: Array, start: Array, end: Array) -> tuple[Array, Array]:
    """Returns (low, high), the range of the 64 rows from `first` on between start and end."""
    low = jnp.clip(start - first, 0, SIDE)
    return low, jnp.maximum(jnp.clip(end - first, 0, SIDE), low)
