"""The TPU's kernel of the grouped matmul: rows times their group's matrices, then an activation.

The grid is (tile of n, visit of a tile of rows, tile of k).

Shapes: m rows, k in, n out, g groups held, s groups counted, p matrices of each group.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moelib.core.varying import struct_like_varying
from moelib.kernels.gmm.groups import Visits, output_visits, row_ranges
from moelib.kernels.gmm.tiles import Job, Tiles, choose, current_chip, kernel_metadata
from moelib.kernels.gmm.tpu_blocks import between, each_block, each_columns, keep, vmem_limit


def product(
    lhs: tuple[Float[Array, "m k"], ...],
    rhs: Float[Array, "g p k n"] | Float[Array, "g p n k"],
    bias: Float[Array, "g p n"] | None,
    group_sizes: Int[Array, "s"],
    group_offset: Int[Array, ""] | None,
    *,
    activation: Callable[..., Array] | None,
    save: bool,
    transpose_rhs: bool,
    out_dtype: DTypeLike,
    tiles: Tiles | None,
    interpret: Any,
) -> tuple[Array, ...]:
    """Returns (the activation of each row's p products, [m, n]; the p products, if `save`).

    Args:
        lhs: The rows, sorted by group: the same for all of the p matrices, or p arrays.
        rhs: p matrices for each group held, [g, p, n, k] if `transpose_rhs`.
        bias: p vectors for each group held.
        group_sizes: Number of rows of each group.
        group_offset: The first group held; 0 by default.
        activation: Of p arrays; None, if p is 1, for the product itself.
        save: Whether to return the products.
        transpose_rhs: Whether to multiply by the transposes.
        out_dtype: Dtype of the results.
        tiles: Chosen by `tiles.choose` by default.
        interpret: What `pl.pallas_call` is given.
    """
    (m, k), (num_groups, p), num_lhs = lhs[0].shape, rhs.shape[:2], len(lhs)
    n = rhs.shape[2 if transpose_rhs else 3]
    out_bytes = jnp.dtype(out_dtype).itemsize
    in_bytes = lhs[0].dtype.itemsize
    job = Job(m, k, n, num_groups, in_bytes, out_bytes, p, save, num_lhs)
    tiles = choose(job, current_chip()) if tiles is None else tiles
    tm, tk, tn = tiles.m, tiles.k, tiles.n
    tiles_n, tiles_k = pl.cdiv(n, tn), pl.cdiv(k, tk)
    starts, ends = row_ranges(group_sizes, m, num_groups, group_offset)
    visits, num_visits = output_visits(starts, ends, m, tm)

    def matrix_spec(part: int) -> pl.BlockSpec:
        def index(j: Array, v: Array, step: Array, visits: Visits) -> tuple[Array | int, ...]:
            return visits.group[v], part, *((j, step) if transpose_rhs else (step, j))

        return pl.BlockSpec((None, None, tn, tk) if transpose_rhs else (None, None, tk, tn), index)

    of_rows = pl.BlockSpec((tm, tk), lambda j, v, step, visits: (visits.tile[v], step))
    of_bias = pl.BlockSpec((None, 1, tn), lambda j, v, step, visits: (visits.group[v], 0, j))
    of_out = pl.BlockSpec((tm, tn), lambda j, v, step, visits: (visits.out_tile[v], j))
    biases = () if bias is None else tuple(bias[:, i : i + 1] for i in range(p))  # [g, 1, n]
    num_outs = 1 + (p if save else 0)
    read = tiles_n * num_lhs * m * k + p * num_groups * k * n
    return pl.pallas_call(
        _Kernel(k, tiles, p, num_lhs, bias is not None, activation, save, transpose_rhs),
        out_shape=[struct_like_varying((m, n), out_dtype, lhs[0])] * num_outs,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(tiles_n, num_visits, tiles_k),
            in_specs=[
                *[of_rows] * num_lhs,
                *map(matrix_spec, range(p)),
                *[of_bias] * len(biases),
            ],
            out_specs=[of_out] * num_outs,
            scratch_shapes=[pltpu.VMEM((p, tm, tn), jnp.float32)] if tiles_k > 1 else [],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=vmem_limit(job, tiles),
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * p * m * k * n,
            bytes_accessed=read * in_bytes + num_outs * m * n * out_bytes,
            transcendentals=m * n if activation else 0,
        ),
        interpret=interpret,
        name="gmm",
        metadata=kernel_metadata(job, tiles),
    )(visits, *lhs, *[rhs] * p, *biases)


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """One grid step: one tile of k of one visit."""

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
        p, num_biases = self.num_parts, self.num_parts * self.has_bias
        lhs, refs = refs[: self.num_lhs], refs[self.num_lhs :]
        matrices, biases, refs = refs[:p], refs[p : p + num_biases], refs[p + num_biases :]
        num_outs = 1 + p * self.save
        outs: Any = refs[:num_outs]
        total: Any = refs[num_outs] if len(refs) > num_outs else None
        visit, step = pl.program_id(1), pl.program_id(2)
        start, end = visits.start[visit], visits.end[visit]

        # Of the tile, the rows that no group writes stay zeros.
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

            each_columns(self.tiles.n, columns)

        each_block(start, end, self.tiles, multiply)

    def _products(self, lhs: Any, matrices: Any, rows: Any, at: Any, step: Array) -> list[Array]:
        lefts = [each[rows, :] for each in lhs]
        rest = self.k - step * self.tiles.k
        reaches_past_k = self.k % self.tiles.k != 0  # In the last step.
        if reaches_past_k:
            lefts = [keep(left, 1, 0, rest) for left in lefts]
        axis = 1 if self.transpose_rhs else 0
        values = []
        for left, matrix in zip(lefts * (self.num_parts // self.num_lhs), matrices, strict=True):
            right = matrix[at, :] if self.transpose_rhs else matrix[:, at]
            if reaches_past_k:
                right = keep(right, axis, 0, rest)
            dims = (((1,), (axis,)), ((), ()))
            values.append(lax.dot_general(left, right, dims, preferred_element_type=jnp.float32))
        return values

    def _add(self, total: Any, values: list[Array], rows: Any, at: Any, step: Array) -> None:
        for part, value in enumerate(values):
            # What another visit's last step left is replaced in the first.
            held = jnp.where(step == 0, 0.0, total[part, rows, at])
            total[part, rows, at] = held + value

    def _store(
        self, outs: Any, biases: Any, values: list[Array], rows: Any, at: Any, own: Any
    ) -> None:
        """Writes the rows; only those from own[0] to own[1] if `own` is given."""
        if self.has_bias:
            added = [bias[:, at].astype(jnp.float32) for bias in biases]
            values = [value + bias for value, bias in zip(values, added, strict=True)]
        first = values[0] if self.activation is None else self.activation(*values)
        for ref, value in zip(outs, [first, *values][: len(outs)], strict=True):
            if own is not None:
                old = ref[rows, at].astype(value.dtype)
                value = jnp.where(between(value.shape, 0, *own), value, old)
            ref[rows, at] = value.astype(ref.dtype)
