"""The TPU's kernel of the grouped matmul's weight gradient: rows times rows, summed by group.

The grid is (tile of k, tile of n, visit of a tile of rows). A group's sum stays in VMEM from its
first visit to its last, and is written once.

Shapes: m rows, k and n sides of a matrix, g groups held, s groups counted, p matrices of each.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moelib.core.varying import struct_like_varying
from moelib.kernels.gmm.groups import Visits, row_ranges, weight_visits
from moelib.kernels.gmm.tiles import Job, Tiles, choose, current_chip, kernel_metadata
from moelib.kernels.gmm.tpu_blocks import each_block, each_columns, keep, vmem_limit


def weight_gradient(
    lhs: Float[Array, "m k"],
    grads: tuple[Float[Array, "m n"], ...],
    group_sizes: Int[Array, "s"],
    group_offset: Int[Array, ""] | None,
    *,
    num_groups: int,
    out_dtype: DTypeLike,
    bias_dtype: DTypeLike | None,
    tiles: Tiles | None,
    interpret: Any,
) -> Any:
    """Returns the sums of `lhs[i]^T grads[:][i]`, [g, p, k, n]; of grads, [g, p, n], if wanted.

    Args:
        lhs: The rows, sorted by group.
        grads: As many rows for each of the p matrices.
        group_sizes: Number of rows of each group.
        group_offset: The first group held; 0 by default.
        num_groups: Number of groups held.
        out_dtype: Dtype of the result.
        bias_dtype: Dtype of the sums of grads, or None for none.
        tiles: Chosen by `tiles.choose` by default.
        interpret: What `pl.pallas_call` is given.
    """
    (m, k), n, p = lhs.shape, grads[0].shape[1], len(grads)
    out_bytes = jnp.dtype(out_dtype).itemsize
    in_bytes = lhs.dtype.itemsize
    job = Job(m, k, n, num_groups, in_bytes, out_bytes, p, weight_gradient=True)
    tiles = choose(job, current_chip()) if tiles is None else tiles
    tm, tk, tn = tiles.m, tiles.k, tiles.n
    tiles_k, tiles_n = pl.cdiv(k, tk), pl.cdiv(n, tn)
    starts, ends = row_ranges(group_sizes, m, num_groups, group_offset)
    visits, num_visits = weight_visits(starts, ends, m, tm)

    def place(j: Array) -> tuple[Array, Array]:
        """Returns (matrix, tile of its columns)."""
        return lax.div(j, jnp.int32(tiles_n)), lax.rem(j, jnp.int32(tiles_n))

    def grad_spec(own: int) -> pl.BlockSpec:
        def index(i: Array, j: Array, v: Array, visits: Visits) -> tuple[Array, ...]:
            part, column = place(j)
            # One block stands still, and is not fetched again, while another matrix's turn is.
            return jnp.where(part == own, visits.tile[v], 0), jnp.where(part == own, column, 0)

        return pl.BlockSpec((tm, tn), index)

    def out_index(i: Array, j: Array, v: Array, visits: Visits) -> tuple[Array, ...]:
        part, column = place(j)
        return visits.group[v], part, i, column

    out_shape = [struct_like_varying((num_groups, p, k, n), out_dtype, lhs)]
    out_specs = [pl.BlockSpec((None, None, tk, tn), out_index)]
    scratch = [pltpu.VMEM((tk, tn), jnp.float32)]
    if bias_dtype is not None:
        # One for each tile of k, all the same: none is written by two cores, or twice.
        def bias_index(i: Array, j: Array, v: Array, visits: Visits) -> tuple[Array | int, ...]:
            part, column = place(j)
            return i, visits.group[v], part, 0, column

        out_shape.append(struct_like_varying((tiles_k, num_groups, p, 1, n), bias_dtype, lhs))
        out_specs.append(pl.BlockSpec((None, None, None, 1, tn), bias_index))
        scratch.append(pltpu.VMEM((1, tn), jnp.float32))
    read = p * (tiles_n * m * k + tiles_k * m * n)
    out = pl.pallas_call(
        functools.partial(_kernel, tiles=tiles, num_parts=p, tiles_n=tiles_n),
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(tiles_k, p * tiles_n, num_visits),
            in_specs=[
                pl.BlockSpec((tm, tk), lambda i, j, v, visits: (visits.tile[v], i)),
                *map(grad_spec, range(p)),
            ],
            out_specs=out_specs,
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=vmem_limit(job, tiles),
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * p * m * k * n,
            bytes_accessed=read * in_bytes + p * num_groups * k * n * out_bytes,
            transcendentals=0,
        ),
        interpret=interpret,
        name="gmm_weight_gradient",
        metadata=kernel_metadata(job, tiles),
    )(visits, lhs, *grads)
    return out[0] if bias_dtype is None else (out[0], out[1][0, :, :, 0])


def _kernel(
    visits: Visits, lhs: Any, *refs: Any, tiles: Tiles, num_parts: int, tiles_n: int
) -> None:
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
            """Both sides are masked, for a NaN in another group's row times zero is NaN."""
            if first_row is None:
                return values
            return keep(values, 0, start - first_row, end - first_row)

        def columns(at: Any) -> None:
            dims = (((0,), (0,)), ((), ()))
            pair = own(lhs[rows, at]), own(right(rows))
            made = lax.dot_general(*pair, dims, preferred_element_type=jnp.float32)
            totals[0][at, :] += made

        each_columns(tiles.k, columns)
        if len(totals) == 2:
            values = own(right(rows)).astype(jnp.float32)
            totals[1][...] += jnp.sum(values, axis=0, keepdims=True)

    each_block(start, end, tiles, add)

    @pl.when(visits.last[visit] == 1)
    def _() -> None:
        for out, total in zip(outs, totals, strict=True):
            out[...] = total[...].astype(out.dtype)


def _right(grads: Any, part: Array, rows: Any) -> Array:
    """Returns the rows of the matrix whose turn it is."""
    values = grads[0][rows, :]
    for other in range(1, len(grads)):
        values = jnp.where(part == other, grads[other][rows, :], values)
    return values
