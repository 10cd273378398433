"""Grouped matmul: what it means, at any cost: every group's matrix meets every row."""

import jax.numpy as jnp
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
    members = _members(group_sizes, lhs.shape[0])
    form = "mk,gnk->mgn" if transpose_rhs else "mk,gkn->mgn"
    every = jnp.einsum(form, lhs, rhs, preferred_element_type=jnp.float32)
    return jnp.where(members[:, :, None], every, 0).sum(axis=1).astype(out_dtype)


def gmm_weight_gradient(
    lhs: Float[Array, "m k"],
    grad: Float[Array, "m n"],
    group_sizes: Int[Array, "g"],
    *,
    out_dtype: DTypeLike,
) -> Float[Array, "g k n"]:
    """Returns the sum of `lhs[i]^T grad[i]` over the rows i of each group."""
    members = _members(group_sizes, lhs.shape[0])[:, :, None]
    own_lhs = jnp.where(members, lhs[:, None], 0)  # [m, g, k]
    own_grad = jnp.where(members, grad[:, None], 0)  # [m, g, n]
    form = "mgk,mgn->gkn"
    return jnp.einsum(form, own_lhs, own_grad, preferred_element_type=jnp.float32).astype(out_dtype)


def _members(group_sizes: Int[Array, "g"], num_rows: int) -> Array:
    """Returns, as [m, g], whether each row belongs to each group."""
    ends = jnp.cumsum(group_sizes)
    rows = jnp.arange(num_rows, dtype=ends.dtype)[:, None]
    return (rows >= (ends - group_sizes)[None]) & (rows < ends[None])
