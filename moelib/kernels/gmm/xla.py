"""Grouped matmul by `jax.lax.ragged_dot`, for which XLA has a kernel on TPUs.

Elsewhere XLA makes it a dense matmul for every group: right, and g times the work.

Shapes: m rows, k in, n out, g groups held, s groups counted.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moelib.kernels.gmm.groups import row_ranges


def gmm(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "g ..."],
    group_sizes: Int[Array, "s"],
    bias: Float[Array, "g n"] | None = None,
    group_offset: Int[Array, ""] | None = None,
    *,
    transpose_rhs: bool,
    out_dtype: DTypeLike,
) -> Float[Array, "m n"]:
    """Returns `lhs[i] @ rhs[group of row i]` plus its bias, zeros for rows of no group held."""
    first, sizes = _held(group_sizes, lhs.shape[0], rhs.shape[0], group_offset)
    lhs = _rolled(lhs, first, -1)
    dims = _dims(((1,), (2 if transpose_rhs else 1,)), groups=[0])
    out = lax.ragged_dot_general(lhs, rhs, sizes, dims, preferred_element_type=jnp.float32)
    if bias is not None:  # One column of ones times each bias as a row.
        dims = _dims(((1,), (1,)), groups=[0])
        ones, rows = jnp.ones_like(lhs, shape=(lhs.shape[0], 1)), bias[:, None].astype(lhs.dtype)
        out += lax.ragged_dot_general(ones, rows, sizes, dims, preferred_element_type=jnp.float32)
    out = jnp.where(_grouped(sizes, lhs.shape[0]), out, 0).astype(out_dtype)
    return _rolled(out, first, 1)


def gmm_weight_gradient(
    lhs: Float[Array, "m k"],
    grad: Float[Array, "m n"],
    group_sizes: Int[Array, "s"],
    group_offset: Int[Array, ""] | None = None,
    *,
    out_dtype: DTypeLike,
    num_groups: int | None = None,
    bias_dtype: DTypeLike | None = None,
) -> Float[Array, "g k n"] | tuple[Float[Array, "g k n"], Float[Array, "g n"]]:
    """Returns the sum of `lhs[i]^T grad[i]` over the rows i of each group held.

    If `bias_dtype` is given, the sums of grad over them too, in that dtype.
    """
    num_groups = len(group_sizes) if num_groups is None else num_groups
    first, sizes = _held(group_sizes, lhs.shape[0], num_groups, group_offset)
    lhs, grad = _rolled(lhs, first, -1), _rolled(grad, first, -1)
    dims = _dims(((0,), (0,)), groups=[])
    out = lax.ragged_dot_general(lhs, grad, sizes, dims, preferred_element_type=jnp.float32)
    if bias_dtype is None:
        return out.astype(out_dtype)
    ones = jnp.ones_like(lhs, shape=(lhs.shape[0], 1))
    sums = lax.ragged_dot_general(ones, grad, sizes, dims, preferred_element_type=jnp.float32)
    return out.astype(out_dtype), sums[:, 0].astype(bias_dtype)


def _dims(contracting: Any, groups: list[int]) -> lax.RaggedDotDimensionNumbers:
    return lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(contracting, ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=groups,
    )


def _held(
    group_sizes: Array, num_rows: int, num_groups: int, offset: Array | None
) -> tuple[Array | None, Array]:
    """Returns the first row of the groups held, if they need not be the first, and their sizes."""
    if offset is None:
        return None, group_sizes
    starts, ends = row_ranges(group_sizes, num_rows, num_groups, offset)
    return starts[0], ends - starts


def _rolled(rows: Array, first: Array | None, sign: int) -> Array:
    """Returns the rows with `first` in front, or back; `ragged_dot` begins at the first row."""
    return rows if first is None else jnp.roll(rows, sign * first, axis=0)


def _grouped(group_sizes: Int[Array, "g"], num_rows: int) -> Array:
    """Returns, as [m, 1], whether each row belongs to a group."""
    return (lax.iota(jnp.int32, num_rows) < jnp.sum(group_sizes, dtype=jnp.int32))[:, None]
