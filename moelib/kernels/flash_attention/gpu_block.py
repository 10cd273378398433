"""The parts that the Hopper GPU's kernels of attention share.

`moelib.kernels.hopper_pipeline` explains how such a kernel works. Here a block of threads takes
one tile of rows of one head: queries, or keys for the gradients of keys and values. Two warpgroups
multiply, and the third one loads the columns that the tile visits, keys or queries. Columns that no
query of the tile sees are not loaded.

Exponentials are of base 2, which the GPU computes in one instruction, so scores are multiplied by
log2(e).

Shapes: r rows of a warpgroup, c columns of a visit.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from moelib.kernels.flash_attention.gpu_tiles import Call, Visited
from moelib.kernels.flash_attention.reference import MaskSpec
from moelib.kernels.flash_attention.visits import least_ahead
from moelib.kernels.hopper import SIDE
from moelib.kernels.hopper_pipeline import Ring, operand, out_slots, split_roles, store

LOG2E = math.log2(math.e)


class _Ring(Ring):
    """A ring whose multipliers wait for and release each step themselves."""

    def wait(self, step: Array) -> Array:
        """Returns the step's slot when it is loaded."""
        slot = self.slot(step)
        plgpu.barrier_wait(self.full.at[slot])
        return slot

    def release(self, step: Array) -> None:
        """Lets the step's slot be loaded again."""
        plgpu.barrier_arrive(self.free.at[self.slot(step)])


class Block:
    """The tile of one block of threads, its visits, and its shared memory.

    With `heads`, a number, the rows are keys, and each of so many heads makes all visits.
    """

    def __init__(
        self, call: Call, masks: Any, heads: int | None, full: Any, free: Any, **scratch: Any
    ):
        self.call, self.heads = call, heads or 1
        self.rows: Any = scratch["rows"]
        self.columns: Any = scratch["columns"]
        self.loaded: Any = scratch["loaded"]
        self.slots: Any = scratch["slots"]
        self.numbers: Any = scratch.get("numbers")
        self.rings = [_Ring(call.tiles.stages, *each) for each in zip(full, free, strict=True)]
        self.visits, counts, self.q_index, self.k_index, *self.segments = masks
        self.batch, self.head = lax.axis_index("batch"), lax.axis_index("head")
        tile = lax.axis_index("tile")
        # Under a causal mask the first keys and the last queries have the most visits.
        tile = counts.shape[1] - 1 - tile if heads is None else tile
        self.row = tile * call.tiles.rows
        self.at = (self.batch if counts.shape[0] > 1 else 0), tile
        self.count = counts[self.at] * self.heads
        self.queries_axis = 0 if heads is None else 1

    def visit(self, i: Array) -> tuple[Array, Array]:
        """Returns (first column, whether the mask lets all of them through) of a step."""
        visit = self.visits[*self.at, lax.div(i, self.heads)]
        return lax.div(visit, 2) * self.call.tiles.columns, lax.rem(visit, 2) == 1

    def load_rows(self, head: Array, *arrays: Any) -> None:
        """Loads the rows of the tile."""
        for array, slots in zip(arrays, self.rows, strict=True):
            for half in range(slots.shape[0]):
                rows = array.at[self.batch, pl.ds(self.row + half * SIDE, SIDE), head]
                plgpu.copy_gmem_to_smem(rows, slots.at[half], self.loaded)

    def load_columns(
        self, head: Callable[[Array], Array], *arrays: Any, numbers: Any = None
    ) -> None:
        """Loads the columns of all steps, of two arrays, and their numbers with the second one."""

        def one(i: Array, _: None) -> None:
            own, columns = head(i), pl.ds(self.visit(i)[0], self.call.tiles.columns)
            for array, slots, ring in zip(arrays, self.columns, self.rings, strict=True):
                slot = ring.acquire(i)
                block = array.at[self.batch, columns, own]
                plgpu.copy_gmem_to_smem(block, slots.at[slot], ring.full.at[slot])
            if numbers is not None:
                block = numbers.at[self.batch, own, :, columns]
                plgpu.copy_gmem_to_smem(block, self.numbers.at[slot], ring.full.at[slot])

        lax.fori_loop(0, self.count, one, None)
        for ring in self.rings:
            ring.drain(self.count)

    def masked(self, x: Array, value: float, row: Array, column: Array, whole: Array) -> Array:
        """Returns a block [r, c] with `value` where the query does not see the key."""

        def of(ref: Any, axis: int) -> Array:
            at = pl.ds((row, column)[axis], x.shape[axis])
            at = (self.batch, at) if len(ref.shape) == 2 else at
            layout = plgpu.Layout.WGMMA.reduce(1 - axis)
            return over(plgpu.load(ref.at[at], layout=layout, optimized=False), x, axis)

        def masked() -> Array:
            spec, q_axis, k_axis = self.call.spec, self.queries_axis, 1 - self.queries_axis
            ahead = of(self.q_index, q_axis) - of(self.k_index, k_axis)
            made = jnp.where(ahead >= least_ahead(spec), x, value)
            if spec.window is not None:
                made = jnp.where(ahead < spec.window, made, value)
            if self.segments:
                same = of(self.segments[0], q_axis) == of(self.segments[1], k_axis)
                made = jnp.where(same, made, value)
            return made

        return lax.cond(whole, lambda: x, masked)

    def add_product(
        self, acc: Array, left: Array, right: Any, *pairs: tuple[Any, Any]
    ) -> tuple[Array, ...]:
        """Returns `acc + left @ right`, with left in registers, and `products(*pairs)`.

        The interpreter knows no operand in registers, so it takes XLA's product.
        """
        if self.call.interpret:
            product = jnp.dot(left, right[...], preferred_element_type=jnp.float32)
            plgpu.commit_smem()
            return acc + product, *products(*pairs)

        def run(sums: Any) -> None:
            plgpu.wgmma(sums[0], left, right)
            _multiply(sums[1:], pairs)

        zeros = (full((rows.shape[0], columns.shape[0])) for rows, columns in pairs)
        made: Any = pl.run_state(run)(tuple(plgpu.ACC.init(x) for x in (acc, *zeros)))
        return made

    def store(self, value: Array, out: Any, row: Array) -> None:
        """Writes a warpgroup's 64 rows of a result; rows past its end are not written."""
        slots = self.slots.at[lax.axis_index("wg")]
        store(value, slots, out.at[self.batch, :, self.head], row, 0, None)


def products(*pairs: tuple[Any, Any]) -> tuple[Array, ...]:
    """Returns products of blocks in shared memory, each with the transpose of another one."""

    def run(*sums: Any) -> tuple[Array, ...]:
        _multiply(sums, pairs)
        return tuple(total[...] for total in sums)

    shapes = ((left.shape[0], right.shape[0]) for left, right in pairs)
    return pl.run_scoped(run, *(plgpu.ACC(shape, jnp.float32) for shape in shapes)) if pairs else ()


def _multiply(sums: Any, pairs: Any) -> None:
    for total, (left, right) in zip(sums, pairs, strict=True):
        plgpu.wgmma(total, left, right.transpose((1, 0)))


def scores(spec: MaskSpec, product: Array) -> Array:
    """Returns the scores after scale and cap, times log2(e)."""
    if spec.logit_cap is None:
        return product * (spec.scale * LOG2E)
    # tanh(x) = 1 - 2 / (1 + exp(2 x)): the GPU's own tanh has an error of 2^-11.
    exp = jnp.exp2(product * (2 * LOG2E * spec.scale / spec.logit_cap))
    return spec.logit_cap * LOG2E * (1.0 - 2.0 / (1.0 + exp))


def before_cap(spec: MaskSpec, scores: Array, probs: Array) -> Array:
    """Returns probabilities times the derivative of the cap."""
    if spec.logit_cap is None:
        return probs
    share = scores * (1 / (spec.logit_cap * LOG2E))
    return probs * (1.0 - share * share)


def over(x: Array, block: Array, axis: int) -> Array:
    """Returns numbers of rows (axis 0) or columns (axis 1), each for all of a block."""
    return lax.broadcast_in_dim(x, block.shape, (axis,))


def full(shape: tuple[int, ...], value: Any = 0.0, layout: Any = plgpu.Layout.WGMMA) -> Array:
    """Returns registers of one float32 value."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def launch(
    name: str,
    load: Callable[..., None],
    multiply: Callable[..., None],
    call: Call,
    visited: Visited,
    *arrays: Array,
    rows: tuple[Array, ...],
    columns: tuple[Array, ...],
    results: list[Any],
    flops: int,
    numbers: tuple[int, ...] | None = None,
    heads: int | None = None,
) -> Any:
    """Returns the results of a kernel.

    Args:
        name: Name of the kernel.
        load: Function of the block, `arrays` and results, which loads the rows and columns.
        multiply: Function of the block, the warpgroup, `arrays` and results; stores the results.
        call: Static arguments.
        visited: Visits and masks.
        *arrays: Other operands.
        rows: Arrays of which a tile is held.
        columns: Pair of arrays of which each visit loads a tile.
        results: Shapes and dtypes [B, S, heads, D]; the grid is that of the first.
        flops: FLOPs of all heads for one pair of query and key.
        numbers: Shape of float32 numbers in shared memory.
        heads: Number of heads that each tile of keys visits; None if rows are queries.
    """
    tiles, masks = call.tiles, [x for x in visited if x is not None]

    def kernel(*refs: Any, **scratch: Any) -> None:
        block, refs = Block(call, refs[: len(masks)], heads, **scratch), refs[len(masks) :]
        split_roles(lambda: load(block, *refs), lambda w: multiply(block, w, *refs))

    kernel.__name__ = name  # Pallas names a kernel after its function.
    halves = tiles.rows // SIDE
    slots = lambda count, size, x: operand((count, size, x.shape[3]), x.dtype)
    ring = lambda count: plgpu.Barrier(num_arrivals=count, num_barriers=tiles.stages)
    scratch: dict[str, Any] = {
        "rows": tuple(slots(halves, SIDE, x) for x in rows),
        "columns": tuple(slots(tiles.stages, tiles.columns, x) for x in columns),
        "loaded": plgpu.Barrier(num_arrivals=halves * len(rows)),
        "full": (ring(1), ring(1 if heads is None else 2)),
        "free": (ring(2), ring(2)),
        "slots": out_slots(results[0].dtype),
    }
    if numbers is not None:
        scratch["numbers"] = plgpu.SMEM(numbers, jnp.float32)
    pairs = arrays[0].shape[0] * call.num_visits * tiles.rows * tiles.columns
    size = lambda x: math.prod(x.shape) * jnp.dtype(x.dtype).itemsize
    run = plgpu.kernel(
        kernel,
        out_type=results,
        scratch_types=scratch,
        grid=(results[0].shape[2], visited.counts.shape[1], arrays[0].shape[0]),
        grid_names=("head", "tile", "batch"),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        cost_estimate=pl.CostEstimate(
            flops=flops * pairs,
            transcendentals=pairs * arrays[0].shape[2],
            bytes_accessed=sum(map(size, (*masks, *arrays, *results))),
        ),
        interpret=call.interpret,
    )
    return tuple(run(*masks, *arrays))
