"""Grouped matmul: what it means, at any cost: every group's matrix meets every row.

Shapes: m rows, k in, n out, g groups held, s groups counted.
"""

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int


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
    members = _members(group_sizes, lhs.shape[0], rhs.shape[0], group_offset)
    form = "mk,gnk->mgn" if transpose_rhs else "mk,gkn->mgn"
    every = jnp.einsum(form, lhs, rhs, preferred_element_type=jnp.float32)
    if bias is not None:
        every += bias[None].astype(jnp.float32)
    return jnp.where(members[:, :, None], every, 0).sum(axis=1).astype(out_dtype)


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
    members = _members(group_sizes, lhs.shape[0], num_groups, group_offset)[:, :, None]
    own_lhs = jnp.where(members, lhs[:, None], 0)  # [m, g, k]
    own_grad = jnp.where(members, grad[:, None], 0)  # [m, g, n]
    form = "mgk,mgn->gkn"
    out = jnp.einsum(form, own_lhs, own_grad, preferred_element_type=jnp.float32).astype(out_dtype)
    if bias_dtype is None:
        return out
    return out, own_grad.astype(jnp.float32).sum(axis=0).astype(bias_dtype)


def _members(
    group_sizes: Int[Array, "s"], num_rows: int, num_groups: int, offset: Array | None
) -> Array:
    """Returns, as [m, g], whether each row belongs to each group held."""
    ends = jnp.cumsum(group_sizes)
    rows = jnp.arange(num_rows, dtype=ends.dtype)[:, None]
    members = (rows >= (ends - group_sizes)[None]) & (rows < ends[None])
    if offset is None:
        return members
    return lax.dynamic_slice_in_dim(members, offset, num_groups, axis=1)
