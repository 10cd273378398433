"""What the TPU's two kernels of the grouped matmul share: loops over blocks, and masks."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from moelib.kernels.gmm.tiles import Job, Tiles, vmem_bytes

_MAX_COLUMNS = 512  # Of one product: a kernel's code is as long as its largest product is wide.


def each_block(start: Array, end: Array, tiles: Tiles, run: Callable[[Any, Any], None]) -> None:
    """Runs `run(rows, first row)` over blocks that hold the rows from start to end of a tile.

    A tile that is all the group's own is one block, whose first row is None: nothing to mask.

    Args:
        start: The group's first row in the tile.
        end: The row after its last; not after start if it has none.
        tiles: The tiles.
        run: Given a slice, and its first row.
    """
    is_full = (start == 0) & (end == tiles.m)

    @pl.when(is_full)
    def _() -> None:
        run(pl.ds(0, tiles.m), None)

    # Two blocks go together while there are two: it takes the MXU as long to load its weights.
    size = tiles.sub_m
    double = 2 * size if tiles.m % (2 * size) == 0 else size
    # None is negative; `//` would ask for a sign, and that for the chip, which may not be known.
    low, high = lax.div(start, jnp.int32(size)), lax.div(end + size - 1, jnp.int32(size))
    count = jnp.where((end > start) & jnp.logical_not(is_full), high - low, 0)

    def block(first_row: Any, rows: int) -> None:
        first_row = pl.multiple_of(first_row, size)
        run(pl.ds(first_row, rows), first_row)

    @pl.loop(0, lax.div(count, jnp.int32(double // size)))
    def _(i: Array) -> None:
        block(low * size + i * double, double)

    if double > size:

        @pl.when(lax.rem(count, jnp.int32(2)) == 1)
        def _() -> None:
            block((high - 1) * size, size)


def each_columns(width: int, run: Callable[[Any], None]) -> None:
    """Runs `run(columns)` over slices of a block's columns."""
    sizes = [size for size in range(128, _MAX_COLUMNS + 1, 128) if width % size == 0]
    if not sizes or width <= _MAX_COLUMNS:
        run(pl.ds(0, width))
        return

    @pl.loop(0, width // sizes[-1])
    def _(i: Array) -> None:
        run(pl.ds(pl.multiple_of(i * sizes[-1], sizes[-1]), sizes[-1]))


def between(shape: tuple[int, ...], axis: int, start: Any, end: Any) -> Array:
    """Returns a mask of the places from start to end of an axis."""
    place = lax.broadcasted_iota(jnp.int32, shape, axis)
    return (place >= start) & (place < end)


def keep(values: Array, axis: int, start: Any, end: Any) -> Array:
    """Returns the values, zeros in place of those not from start to end of an axis."""
    return jnp.where(between(values.shape, axis, start, end), values, jnp.zeros_like(values))


def vmem_limit(job: Job, tiles: Tiles) -> int:
    """Returns a kernel's VMEM limit, no less than the compiler's own."""
    return max(vmem_bytes(job, tiles), 16 * 2**20)
