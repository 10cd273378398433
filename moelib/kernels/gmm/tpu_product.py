"""The TPU's kernel of the grouped matmul: rows times their group's matrices, then an activation.

The grid is (tile of n, visit of a tile of rows, tile of k).

Shapes: m rows, k in, n out, g groups held, s groups counted, p matrices side by side.
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

from moelib.kernels.gmm.groups import Visits, output_visits, row_ranges
from moelib.kernels.gmm.tiles import Job, Tiles, choose, current_chip, kernel_metadata
from moelib.kernels.gmm.tpu_blocks import between, each_block, each_columns, keep, like, vmem_limit


def product(
    lhs: Float[Array, "m k"],
    matrices: tuple[Float[Array, "g ..."], ...],
    bias: Float[Array, "g p n"] | None,
    group_sizes: Int[Array, "s"],
    group_offset: Int[Array, ""] | None,
    *,
    num_parts: int,
    activation: Callable[..., Array] | None,
    save: bool,
    transpose_rhs: bool,
    out_dtype: DTypeLike,
    tiles: Tiles | None,
    interpret: Any,
) -> tuple[Array, ...]:
    """Returns the activation of each row's p products, ([m, n],); with them, [p, m, n], if `save`.

    Args:
        lhs: The rows, sorted by group.
        matrices: p arrays of matrices, [g, k, n] or, if `transpose_rhs`, [g, n, k]; or one array,
            [g, k, p * n], with the matrices in its columns.
        bias: p vectors for each group held.
        group_sizes: Number of rows of each group.
        group_offset: The first group held; 0 by default.
        num_parts: p.
        activation: Of p arrays; None, if p is 1, for the product itself.
        save: Whether to return the products.
        transpose_rhs: Whether to multiply by the transposes.
        out_dtype: Dtype of the results.
        tiles: Chosen by `tiles.choose` by default.
        interpret: What `pl.pallas_call` is given.
    """
    (m, k), p, num_groups = lhs.shape, num_parts, matrices[0].shape[0]
    width = matrices[0].shape[1 if transpose_rhs else 2]
    n = width // (p // len(matrices))
    matrices = matrices * (p // len(matrices))
    out_bytes = jnp.dtype(out_dtype).itemsize
    job = Job(m, k, n, num_groups, lhs.dtype.itemsize, out_bytes, p, save)
    tiles = choose(job, current_chip()) if tiles is None else tiles
    tm, tk, tn = tiles.m, tiles.k, tiles.n
    tiles_n, tiles_k = pl.cdiv(n, tn), pl.cdiv(k, tk)
    starts, ends = row_ranges(group_sizes, m, num_groups, group_offset)
    visits, num_visits = output_visits(starts, ends, m, tm)

    def matrix_spec(part: int) -> pl.BlockSpec:
        first = part * (n // tn) if width != n else 0

        def index(j: Array, v: Array, step: Array, visits: Visits) -> tuple[Array, ...]:
            place = (first + j, step) if transpose_rhs else (step, first + j)
            return visits.group[v], *place

        return pl.BlockSpec((None, tn, tk) if transpose_rhs else (None, tk, tn), index)

    in_specs = [pl.BlockSpec((tm, tk), lambda j, v, step, visits: (visits.tile[v], step))]
    in_specs += map(matrix_spec, range(p))
    biases = () if bias is None else tuple(bias[:, i : i + 1] for i in range(p))  # [g, 1, n]
    for _ in biases:
        in_specs.append(
            pl.BlockSpec((None, 1, tn), lambda j, v, step, visits: (visits.group[v], 0, j))
        )
    out_specs = [pl.BlockSpec((tm, tn), lambda j, v, step, visits: (visits.out_tile[v], j))]
    out_shape = [like((m, n), out_dtype, lhs)]
    if save:
        out_specs.append(
            pl.BlockSpec((p, tm, tn), lambda j, v, step, visits: (0, visits.out_tile[v], j))
        )
        out_shape.append(like((p, m, n), out_dtype, lhs))
    read = tiles_n * m * k + p * num_groups * k * n
    return pl.pallas_call(
        _Kernel(k, tiles, p, bias is not None, activation, save, transpose_rhs),
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(tiles_n, num_visits, tiles_k),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=[pltpu.VMEM((p, tm, tn), jnp.float32)] if tiles_k > 1 else [],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=vmem_limit(job, tiles),
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * p * m * k * n,
            bytes_accessed=read * lhs.dtype.itemsize + (1 + p * save) * m * n * out_bytes,
            transcendentals=m * n if activation else 0,
        ),
        interpret=interpret,
        name="gmm",
        metadata=kernel_metadata(job, tiles),
    )(visits, lhs, *matrices, *biases)


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """One grid step: one tile of k of one visit."""

    k: int
    tiles: Tiles
    num_parts: int
    has_bias: bool
    activation: Callable[..., Array] | None
    save: bool
    transpose_rhs: bool

    # Pallas names a kernel after its function.
    __name__ = "gmm"

    def __call__(self, visits: Visits, lhs: Any, *refs: Any) -> None:
        p, num_biases = self.num_parts, self.num_parts * self.has_bias
        matrices, biases, refs = refs[:p], refs[p : p + num_biases], refs[p + num_biases :]
        num_outs = 1 + self.save
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
        left = lhs[rows, :]
        rest = self.k - step * self.tiles.k
        reaches_past_k = self.k % self.tiles.k != 0  # In the last step.
        if reaches_past_k:
            left = keep(left, 1, 0, rest)
        axis = 1 if self.transpose_rhs else 0
        values = []
        for matrix in matrices:
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
        places = [(outs[0], first)]
        if self.save:
            places += [(outs[1].at[part], value) for part, value in enumerate(values)]
        for ref, value in places:
            if own is not None:
                old = ref[rows, at].astype(value.dtype)
                value = jnp.where(between(value.shape, 0, *own), value, old)
            ref[rows, at] = value.astype(ref.dtype)
