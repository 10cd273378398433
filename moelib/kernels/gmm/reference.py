"""Reference of the grouped matmul: every row is multiplied by every group's matrices.

Shapes: m rows, k in, n out, g groups, p matrices per group.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def forward(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "g p k n"],
    group_sizes: Int[Array, "g"],
    bias: Float[Array, "g p n"] | None,
    *,
    activation: Callable[..., Array] | None,
    save: bool,
) -> tuple[Float[Array, "m n"], tuple[Float[Array, "m n"], ...]]:
    """Returns the activation of each row's p products (the product itself if None), and these."""
    members = _members(group_sizes, lhs.shape[0])
    products = _products(lhs, rhs, members)
    if bias is not None:
        products += jnp.einsum("mg,gpn->pmn", members.astype(jnp.float32), bias.astype(jnp.float32))
    out = products[0] if activation is None else activation(*products)
    out = jnp.where(members.any(axis=1)[:, None], out, 0).astype(lhs.dtype)
    return out, tuple(products.astype(lhs.dtype)) if save else ()


def input_gradient(
    grads: tuple[Float[Array, "m n"], ...],
    rhs: Float[Array, "g p k n"],
    group_sizes: Int[Array, "g"],
) -> Float[Array, "m k"]:
    """Returns the gradient of the rows, from that of their p products."""
    lhs = jnp.zeros((grads[0].shape[0], rhs.shape[2]), rhs.dtype)
    return _pulled(lhs, rhs, grads, group_sizes)[0]


def weight_gradient(
    lhs: Float[Array, "m k"],
    grads: tuple[Float[Array, "m n"], ...],
    group_sizes: Int[Array, "g"],
    *,
    with_sums: bool,
) -> tuple[Float[Array, "g p k n"], Float[Array, "g p n"] | None]:
    """Returns the gradient of the matrices, and that of the biases if `with_sums`."""
    shape = (len(group_sizes), len(grads), lhs.shape[1], grads[0].shape[1])
    weights = _pulled(lhs, jnp.zeros(shape, lhs.dtype), grads, group_sizes)[1]
    if not with_sums:
        return weights, None
    members = _members(group_sizes, lhs.shape[0])[:, :, None, None]  # [m, g, 1, 1]
    own = jnp.where(members, jnp.stack(grads, 1)[:, None], 0)  # [m, g, p, n]
    return weights, jnp.sum(own, axis=0, dtype=jnp.float32).astype(lhs.dtype)


def _members(group_sizes: Int[Array, "g"], num_rows: int) -> Array:
    """Returns, as [m, g], whether each row belongs to each group."""
    ends = jnp.cumsum(group_sizes)
    rows = jnp.arange(num_rows, dtype=ends.dtype)[:, None]
    return (rows >= (ends - group_sizes)[None]) & (rows < ends[None])


def _products(lhs: Array, rhs: Array, members: Array) -> Float[Array, "p m n"]:
    own = jnp.where(members[:, :, None], lhs[:, None], 0)  # [m, g, k]
    return jnp.einsum("mgk,gpkn->pmn", own, rhs, preferred_element_type=jnp.float32)


def _pulled(lhs: Array, rhs: Array, grads: tuple[Array, ...], sizes: Array) -> tuple[Array, Array]:
    members = _members(sizes, lhs.shape[0])
    _, pull = jax.vjp(lambda lhs, rhs: _products(lhs, rhs, members), lhs, rhs)
    grad = jnp.stack(grads).astype(jnp.float32)
    return pull(jnp.where(members.any(axis=1)[None, :, None], grad, 0))
