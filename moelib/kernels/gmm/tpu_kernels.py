"""The Pallas TPU kernels of the grouped matmul: rows times matrices, and rows times rows by group.

Shapes: m rows, k in, n out, g groups, p matrices per group.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from moelib.kernels.gmm.groups import Visits
from moelib.kernels.gmm.tpu_tiles import MAX_COLUMNS, Tiles


@dataclasses.dataclass(frozen=True)
class Product:
    """Rows times matrices; one grid step is one tile of k of one visit."""

    k: int
    tiles: Tiles
    num_parts: int
    num_lhs: int
    has_bias: bool
    activation: Callable[..., Array] | None
    save: bool
    transpose_rhs: bool

    # Pallas names a kernel after its function.
    __name__ = "gmm"

    def __call__(self, visits: Visits, *refs: Any) -> None:
        """Runs one grid step."""
        p, num_biases = self.num_parts, self.num_parts * self.has_bias
        lhs, refs = refs[: self.num_lhs], refs[self.num_lhs :]
        matrices, biases, refs = refs[:p], refs[p : p + num_biases], refs[p + num_biases :]
        num_outs = 1 + p * self.save
        outs: Any = refs[:num_outs]
        total: Any = refs[num_outs] if len(refs) > num_outs else None
        visit, step = pl.program_id(1), pl.program_id(2)
        start, end = visits.start[visit], visits.end[visit]

        # Rows of the tile that no group writes stay zeros.
        is_full = (start == 0) & (end == self.tiles.m)

        @pl.when((visits.first[visit] == 1) & (step == 0) & jnp.logical_not(is_full))
        def _() -> None:
            for out in outs:
                out[...] = jnp.zeros_like(out)

        def multiply(rows: Any, first_row: Any) -> None:
            def columns(at: Any) -> None:
                values = self._products(lhs, matrices, rows, at, step)
                own = None if first_row is None else (start - first_row, end - first_row)
                if total is None:
                    self._store(outs, biases, values, rows, at, own)
                else:
                    self._add(total, values, rows, at, step)

                    @pl.when(step == pl.cdiv(self.k, self.tiles.k) - 1)
                    def _() -> None:
                        sums = [total[part, rows, at] for part in range(p)]
                        self._store(outs, biases, sums, rows, at, own)

            _each_columns(self.tiles.n, columns)

        _each_block(start, end, self.tiles, multiply)

    def _products(self, lhs: Any, matrices: Any, rows: Any, at: Any, step: Array) -> list[Array]:
        lefts = [each[rows, :] for each in lhs]
        rest = self.k - step * self.tiles.k
        reaches_past_k = self.k % self.tiles.k != 0  # The last step does.
        if reaches_past_k:
            lefts = [_keep(left, 1, 0, rest) for left in lefts]
        axis = 1 if self.transpose_rhs else 0
        values = []
        for left, matrix in zip(lefts * (self.num_parts // self.num_lhs), matrices, strict=True):
            right = matrix[at, :] if self.transpose_rhs else matrix[:, at]
            if reaches_past_k:
                right = _keep(right, axis, 0, rest)
            dims = (((1,), (axis,)), ((), ()))
            values.append(lax.dot_general(left, right, dims, preferred_element_type=jnp.float32))
        return values

    def _add(self, total: Any, values: list[Array], rows: Any, at: Any, step: Array) -> None:
        for part, value in enumerate(values):
            # The first step replaces the sum of the visit before.
            held = jnp.where(step == 0, 0.0, total[part, rows, at])
            total[part, rows, at] = held + value

    def _store(
        self, outs: Any, biases: Any, values: list[Array], rows: Any, at: Any, own: Any
    ) -> None:
        """Writes the rows, or only those from own[0] to own[1]."""
        if self.has_bias:
            added = [bias[:, at].astype(jnp.float32) for bias in biases]
            values = [value + bias for value, bias in zip(values, added, strict=True)]
        first = values[0] if self.activation is None else self.activation(*values)
        for ref, value in zip(outs, [first, *values][: len(outs)], strict=True):
            if own is not None:
                old = ref[rows, at].astype(value.dtype)
                value = jnp.where(_between(value.shape, 0, *own), value, old)
            ref[rows, at] = value.astype(ref.dtype)


def weight_gradient_kernel(
    visits: Visits, lhs: Any, *refs: Any, tiles: Tiles, num_parts: int, tiles_n: int
) -> None:
    """Rows times rows, summed by group; one grid step is one visit."""
    grads, refs = refs[:num_parts], refs[num_parts:]
    outs, totals = refs[: len(refs) // 2], refs[len(refs) // 2 :]
    visit = pl.program_id(2)
    start, end = visits.start[visit], visits.end[visit]

    @pl.when(visits.first[visit] == 1)
    def _() -> None:
        for total in totals:
            total[...] = jnp.zeros_like(total)

    right = functools.partial(_right, grads, lax.div(pl.program_id(1), jnp.int32(tiles_n)))

    def add(rows: Any, first_row: Any) -> None:
        def own(values: Array) -> Array:
            # Both sides are masked, because a NaN in another group's row times zero is NaN.
            if first_row is None:
                return values
            return _keep(values, 0, start - first_row, end - first_row)

        def columns(at: Any) -> None:
            dims = (((0,), (0,)), ((), ()))
            pair = own(lhs[rows, at]), own(right(rows))
            result = lax.dot_general(*pair, dims, preferred_element_type=jnp.float32)
            totals[0][at, :] += result

        _each_columns(tiles.k, columns)
        if len(totals) == 2:
            values = own(right(rows)).astype(jnp.float32)
            totals[1][...] += jnp.sum(values, axis=0, keepdims=True)

    _each_block(start, end, tiles, add)

    @pl.when(visits.last[visit] == 1)
    def _() -> None:
        for out, total in zip(outs, totals, strict=True):
            out[...] = total[...].astype(out.dtype)


def _right(grads: Any, part: Array, rows: Any) -> Array:
    """Returns the rows of the gradient of part `part`."""
    values = grads[0][rows, :]
    for other in range(1, len(grads)):
        values = jnp.where(part == other, grads[other][rows, :], values)
    return values


def _each_block(start: Array, end: Array, tiles: Tiles, run: Callable[[Any, Any], None]) -> None:
    """Runs `run(slice of rows, first row)` over blocks that cover the rows from start to end.

    A tile whose rows all belong to the group is one block, whose first row is None: nothing to
    mask.
    """
    is_full = (start == 0) & (end == tiles.m)

    @pl.when(is_full)
    def _() -> None:
        run(pl.ds(0, tiles.m), None)

    # Blocks go in pairs: loading weights takes the MXU as long as multiplying two of them.
    size = tiles.sub_m
    double = 2 * size if tiles.m % (2 * size) == 0 else size
    # Not `//`: it lowers to a sign, whose lowering depends on the chip, which may be unknown.
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


def _each_columns(width: int, run: Callable[[Any], None]) -> None:
    """Runs `run(columns)` over slices of a block's columns."""
    sizes = [size for size in range(128, MAX_COLUMNS + 1, 128) if width % size == 0]
    if not sizes or width <= MAX_COLUMNS:
        run(pl.ds(0, width))
        return

    @pl.loop(0, width // sizes[-1])
    def _(i: Array) -> None:
        run(pl.ds(pl.multiple_of(i * sizes[-1], sizes[-1]), sizes[-1]))


def _between(shape: tuple[int, ...], axis: int, start: Any, end: Any) -> Array:
    """Returns a mask of the indices from start to end of an axis."""
    index = lax.broadcasted_iota(jnp.int32, shape, axis)
    return (index >= start) & (index < end)


def _keep(values: Array, axis: int, start: Any, end: Any) -> Array:
    """Returns the values from start to end of an axis, and zeros instead of the others."""
    return jnp.where(_between(values.shape, axis, start, end), values, jnp.zeros_like(values))
