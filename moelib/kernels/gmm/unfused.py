"""Grouped matmul with an activation as one grouped matmul per part, for backends without fusion.

A backend has `gmm`, rows times the i-th matrix of their group, and `gmm_weight_gradient`.

Shapes: m rows, k in, n out, g groups, p matrices per group.
"""

import functools
import operator
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def forward(
    backend: ModuleType,
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "g p k n"],
    group_sizes: Int[Array, "g"],
    bias: Float[Array, "g p n"] | None,
    *,
    activation: Callable[..., Array] | None,
    save: bool,
    **options: Any,
) -> tuple[Float[Array, "m n"], tuple[Float[Array, "m n"], ...]]:
    """Returns the activation of p products, which are rounded, and the products if `save`."""
    kw = {"transpose_rhs": False, "out_dtype": lhs.dtype, **options}
    parts = tuple(
        backend.gmm(lhs, rhs, i, group_sizes, None if bias is None else bias[:, i], **kw)
        for i in range(rhs.shape[1])
    )
    if activation is None:
        return parts[0], ()
    out = activation(*(part.astype(jnp.float32) for part in parts)).astype(lhs.dtype)
    rows = lax.iota(jnp.int32, lhs.shape[0])[:, None]
    out = jnp.where(rows < jnp.sum(group_sizes, dtype=jnp.int32), out, 0)
    return out, parts if save else ()


def input_gradient(
    backend: ModuleType,
    grads: tuple[Float[Array, "m n"], ...],
    rhs: Float[Array, "g p k n"],
    group_sizes: Int[Array, "g"],
    **options: Any,
) -> Float[Array, "m k"]:
    """Returns the sum over p of `grads[p] @ rhs[:, p]^T`, by group."""
    dtype = rhs.dtype if len(grads) == 1 else jnp.float32
    kw = {"transpose_rhs": True, "out_dtype": dtype, **options}
    parts = [backend.gmm(grad, rhs, i, group_sizes, None, **kw) for i, grad in enumerate(grads)]
    return functools.reduce(operator.add, parts).astype(rhs.dtype)


def weight_gradient(
    backend: ModuleType,
    lhs: Float[Array, "m k"],
    grads: tuple[Float[Array, "m n"], ...],
    group_sizes: Int[Array, "g"],
    **options: Any,
) -> tuple[Float[Array, "g p k n"], Float[Array, "g p n"] | None]:
    """Returns the gradients of the p matrices of each group, and of their biases if wanted."""
    result = [backend.gmm_weight_gradient(lhs, grad, group_sizes, **options) for grad in grads]
    return jax.tree.map(lambda *x: jnp.stack(x, 1), *result)
