"""Grouped matmul for TPUs: Pallas kernels that visit each tile of rows once for each of its groups.

The grid has as many steps as there are visits, counted at run time: a tile without rows of a group
is filled with zeros, and neither it nor an empty group is read or multiplied. A group's matrix,
whole in k if it fits, stays in VMEM from the group's first visit to its last. A visit in which all
rows of the tile are the group's own multiplies them at once; any other multiplies only the blocks
of `Tiles.sub_m` rows in which the group has rows.

Shapes: m rows, k in, n out, g groups, p matrices per group.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moelib.core.varying import struct_like_varying
from moelib.kernels.gmm.groups import Visits, output_visits, row_ranges, weight_visits
from moelib.kernels.gmm.tpu_kernels import Product, weight_gradient_kernel
from moelib.kernels.gmm.tpu_tiles import Job, Tiles, choose, current_chip, vmem_bytes

_DTYPES = ("bfloat16", "float32")


def reason_against(dtype: DTypeLike) -> str | None:
    """Returns why the kernels cannot take operands of a dtype and what to do, None if they can."""
    if str(jnp.dtype(dtype)) in _DTYPES:
        return None
    return f"takes {' and '.join(_DTYPES)}, not {jnp.dtype(dtype)}; cast to one of them."


def forward(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "g p k n"],
    group_sizes: Int[Array, "g"],
    bias: Float[Array, "g p n"] | None,
    *,
    activation: Callable[..., Array] | None,
    save: bool,
    tiles: Tiles | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "m n"], tuple[Float[Array, "m n"], ...]]:
    """Returns the activation of each row's p products, and the products if `save`.

    The activation is an elementwise function of p arrays in float32, or None if p is 1.
    `tpu_tiles.choose` chooses the tiles by default.
    """
    out, *products = _product(
        (lhs,), rhs, group_sizes, bias, activation, save, False, tiles, interpret
    )
    return out, tuple(products)


def input_gradient(
    grads: tuple[Float[Array, "m n"], ...],
    rhs: Float[Array, "g p k n"],
    group_sizes: Int[Array, "g"],
    *,
    tiles: Tiles | None = None,
    interpret: Any = False,
) -> Float[Array, "m k"]:
    """Returns the sum over p of `grads[p][i] @ rhs[group of row i, p]^T`."""
    join = _sum if len(grads) > 1 else None
    return _product(grads, rhs, group_sizes, None, join, False, True, tiles, interpret)[0]


def _sum(*parts: Array) -> Array:
    return functools.reduce(operator.add, parts)


def _product(
    lhs: tuple[Array, ...],
    rhs: Array,
    group_sizes: Array,
    bias: Array | None,
    activation: Callable[..., Array] | None,
    save: bool,
    transpose_rhs: bool,
    tiles: Tiles | None,
    interpret: Any,
) -> tuple[Array, ...]:
    """Returns (activation of each row's p products, p products if `save`).

    The rows are the same for all of the p matrices, or p arrays. The grid is (tile of n, visit of a
    tile of rows, tile of k).
    """
    (m, k), (g, p), num_lhs = lhs[0].shape, rhs.shape[:2], len(lhs)
    n = rhs.shape[2 if transpose_rhs else 3]
    size = lhs[0].dtype.itemsize
    job = Job(m, k, n, g, size, p, save, num_lhs)
    tiles = choose(job, current_chip()) if tiles is None else tiles
    tm, tk, tn = tiles.m, tiles.k, tiles.n
    tiles_n, tiles_k = pl.cdiv(n, tn), pl.cdiv(k, tk)
    visits, num_visits = output_visits(*row_ranges(group_sizes, m), m, tm)

    def matrix_spec(part: int) -> pl.BlockSpec:
        def index(j: Array, v: Array, step: Array, visits: Visits) -> tuple[Array | int, ...]:
            return visits.group[v], part, *((j, step) if transpose_rhs else (step, j))

        return pl.BlockSpec((None, None, tn, tk) if transpose_rhs else (None, None, tk, tn), index)

    row_spec = pl.BlockSpec((tm, tk), lambda j, v, step, visits: (visits.tile[v], step))
    bias_spec = pl.BlockSpec((None, 1, tn), lambda j, v, step, visits: (visits.group[v], 0, j))
    out_spec = pl.BlockSpec((tm, tn), lambda j, v, step, visits: (visits.out_tile[v], j))
    biases = () if bias is None else tuple(bias[:, i : i + 1] for i in range(p))  # [g, 1, n]
    num_outs = 1 + (p if save else 0)
    in_specs = [row_spec] * num_lhs + [matrix_spec(i) for i in range(p)] + [bias_spec] * len(biases)
    return pl.pallas_call(
        Product(k, tiles, p, num_lhs, bias is not None, activation, save, transpose_rhs),
        out_shape=[struct_like_varying((m, n), lhs[0].dtype, lhs[0])] * num_outs,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(tiles_n, num_visits, tiles_k),
            in_specs=in_specs,
            out_specs=[out_spec] * num_outs,
            scratch_shapes=[pltpu.VMEM((p, tm, tn), jnp.float32)] if tiles_k > 1 else [],
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * p * m * k * n,
            bytes_accessed=size * (tiles_n * num_lhs * m * k + p * g * k * n + num_outs * m * n),
            transcendentals=m * n if activation else 0,
        ),
        interpret=interpret,
        name="gmm",
        **_compiler_options(job, tiles),
    )(visits, *lhs, *[rhs] * p, *biases)


def weight_gradient(
    lhs: Float[Array, "m k"],
    grads: tuple[Float[Array, "m n"], ...],
    group_sizes: Int[Array, "g"],
    *,
    with_sums: bool,
    tiles: Tiles | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "g p k n"], Float[Array, "g p n"] | None]:
    """Returns the sums over each group's rows i of `lhs[i]^T grads[p][i]`, and of grads if wanted.

    The grid is (tile of k, tile of n, visit of a tile of rows). A group's sum stays in VMEM from
    its first visit to its last, and is written once.
    """
    (m, k), n, p, g = lhs.shape, grads[0].shape[1], len(grads), len(group_sizes)
    size = lhs.dtype.itemsize
    job = Job(m, k, n, g, size, p, weight_gradient=True)
    tiles = choose(job, current_chip()) if tiles is None else tiles
    tm, tk, tn = tiles.m, tiles.k, tiles.n
    tiles_k, tiles_n = pl.cdiv(k, tk), pl.cdiv(n, tn)
    visits, num_visits = weight_visits(*row_ranges(group_sizes, m), m, tm)

    def part_and_column(j: Array) -> tuple[Array, Array]:
        return lax.div(j, jnp.int32(tiles_n)), lax.rem(j, jnp.int32(tiles_n))

    def grad_spec(own: int) -> pl.BlockSpec:
        def index(i: Array, j: Array, v: Array, visits: Visits) -> tuple[Array, ...]:
            part, column = part_and_column(j)
            # While another part is summed, the block stays the same, and is not fetched again.
            return jnp.where(part == own, visits.tile[v], 0), jnp.where(part == own, column, 0)

        return pl.BlockSpec((tm, tn), index)

    def out_index(i: Array, j: Array, v: Array, visits: Visits) -> tuple[Array, ...]:
        part, column = part_and_column(j)
        return visits.group[v], part, i, column

    out_shape = [struct_like_varying((g, p, k, n), lhs.dtype, lhs)]
    out_specs = [pl.BlockSpec((None, None, tk, tn), out_index)]
    scratch = [pltpu.VMEM((tk, tn), jnp.float32)]
    if with_sums:
        # One for each tile of k, all the same: none is written by two cores, or twice.
        def sums_index(i: Array, j: Array, v: Array, visits: Visits) -> tuple[Array | int, ...]:
            part, column = part_and_column(j)
            return i, visits.group[v], part, 0, column

        out_shape.append(struct_like_varying((tiles_k, g, p, 1, n), lhs.dtype, lhs))
        out_specs.append(pl.BlockSpec((None, None, None, 1, tn), sums_index))
        scratch.append(pltpu.VMEM((1, tn), jnp.float32))
    read = p * (tiles_n * m * k + tiles_k * m * n)
    out = pl.pallas_call(
        functools.partial(weight_gradient_kernel, tiles=tiles, num_parts=p, tiles_n=tiles_n),
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
        cost_estimate=pl.CostEstimate(
            flops=2 * p * m * k * n,
            bytes_accessed=size * (read + p * g * k * n),
            transcendentals=0,
        ),
        interpret=interpret,
        name="gmm_weight_gradient",
        **_compiler_options(job, tiles),
    )(visits, lhs, *grads)
    return out[0], out[1][0, :, :, 0] if with_sums else None


def _compiler_options(job: Job, tiles: Tiles) -> dict[str, Any]:
    """Returns what both kernels tell the compiler, and the reader of the compiled program.

    The VMEM limit is no less than the compiler's own; the metadata suffice to count the rows that
    are computed.
    """
    return {
        "compiler_params": pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=max(vmem_bytes(job, tiles), 16 * 2**20),
        ),
        "metadata": {"rows": str(job.m), "groups": str(job.g), "rows_at_once": str(tiles.sub_m)},
    }
