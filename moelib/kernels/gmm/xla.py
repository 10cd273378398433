"""Grouped matmul by `jax.lax.ragged_dot`: the form for TPUs, where XLA has a kernel for it.

Elsewhere XLA makes it a dense matmul for every group: right, and g times the work.
"""

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int


def gmm(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "g ..."],
    group_sizes: Int[Array, "g"],
    *,
    transpose_rhs: bool,
    out_dtype: DTypeLike,
) -> Float[Array, "m n"]:
    """Returns `lhs[i] @ rhs[group of row i]`, zeros for rows of no group."""
    dims = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2 if transpose_rhs else 1,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    out = lax.ragged_dot_general(lhs, rhs, group_sizes, dims, preferred_element_type=jnp.float32)
    return jnp.where(_grouped(group_sizes, lhs.shape[0]), out, 0).astype(out_dtype)


def gmm_weight_gradient(
    lhs: Float[Array, "m k"],
    grad: Float[Array, "m n"],
    group_sizes: Int[Array, "g"],
    *,
    out_dtype: DTypeLike,
) -> Float[Array, "g k n"]:
    """Returns the sum of `lhs[i]^T grad[i]` over the rows i of each group."""
    dims = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[],
    )
    out = lax.ragged_dot_general(lhs, grad, group_sizes, dims, preferred_element_type=jnp.float32)
    return out.astype(out_dtype)


def _grouped(group_sizes: Int[Array, "g"], num_rows: int) -> Array:
    """Returns, as [m, 1], whether each row belongs to a group."""
    return (lax.iota(jnp.int32, num_rows) < jnp.sum(group_sizes, dtype=jnp.int32))[:, None]
