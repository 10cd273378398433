"""Reference of the grouped matmul: all rows times the matrices of one group after the other.

Shapes: m rows, k in, n out, g groups, p matrices per group.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moelib.core.varying import zeros_like_varying


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
    products = _products(lhs, rhs, bias, group_sizes)
    out = products[0] if activation is None else activation(*products)
    out = jnp.where(_is_in_group(lhs, group_sizes), out, 0).astype(lhs.dtype)
    return out, tuple(products.astype(lhs.dtype)) if save else ()


def input_gradient(
    grads: tuple[Float[Array, "m n"], ...],
    rhs: Float[Array, "g p k n"],
    group_sizes: Int[Array, "g"],
) -> Float[Array, "m k"]:
    """Returns the gradient of the rows, from that of their p products."""
    lhs = zeros_like_varying((len(grads[0]), rhs.shape[2]), rhs.dtype, rhs)
    _, pull = jax.vjp(lambda lhs: _products(lhs, rhs, None, group_sizes), lhs)
    return pull(jnp.stack(grads).astype(jnp.float32))[0]


def weight_gradient(
    lhs: Float[Array, "m k"],
    grads: tuple[Float[Array, "m n"], ...],
    group_sizes: Int[Array, "g"],
    *,
    with_sums: bool,
) -> tuple[Float[Array, "g p k n"], Float[Array, "g p n"] | None]:
    """Returns the gradient of the matrices, and that of the biases if `with_sums`."""
    shape = (len(group_sizes), len(grads), lhs.shape[1], grads[0].shape[1])
    rhs = zeros_like_varying(shape, lhs.dtype, lhs)
    bias = rhs[:, :, 0] if with_sums else None
    _, pull = jax.vjp(lambda rhs, bias: _products(lhs, rhs, bias, group_sizes), rhs, bias)
    return pull(jnp.stack(grads).astype(jnp.float32))


def _is_in_group(lhs: Array, sizes: Array) -> Bool[Array, "m 1"]:
    return (jnp.arange(len(lhs)) < jnp.sum(sizes))[:, None]


def _products(lhs: Array, rhs: Array, bias: Array | None, sizes: Array) -> Float[Array, "p m n"]:
    """Returns the products in float32, zeros for rows of no group, which may hold anything."""
    lhs, ends = jnp.where(_is_in_group(lhs, sizes), lhs, 0), jnp.cumsum(sizes)
    rows = jnp.arange(len(lhs), dtype=ends.dtype)[:, None]

    def add(total: Array, group: Any) -> tuple[Array, None]:
        rhs, bias, first, end = group
        products = jnp.einsum("mk,pkn->pmn", lhs, rhs, preferred_element_type=jnp.float32)
        if bias is not None:
            products += bias.astype(jnp.float32)[:, None]
        return total + jnp.where((rows >= first) & (rows < end), products, 0), None

    start = zeros_like_varying((rhs.shape[1], len(lhs), rhs.shape[3]), jnp.float32, lhs)
    return jax.lax.scan(add, start, (rhs, bias, ends - sizes, ends))[0]
