"""Matmuls of quantized arrays by their definition, in float32, and without a custom gradient."""

from typing import Any

import jax
import jax.numpy as jnp

from moelib.kernels.gmm import gmm
from moelib.kernels.quantized_matmul.quantize import ROWS, Quantized, quantize


def dot(spec: str, a: Quantized, b: Quantized, *, dtype: Any) -> jax.Array:
    """Returns the einsum of the arrays that two quantized arrays stand for."""
    operands = (x.dequantized(jnp.float32) for x in (a, b))
    return jnp.einsum(spec, *operands, precision=jax.lax.Precision.HIGHEST).astype(dtype)


def straight_through(
    x: jax.Array, weight: Quantized, gradient_of: jax.Array, group_sizes: Any = None
) -> jax.Array:
    """Returns x w of quantized operands, whose gradients are those of exact matmuls.

    Gradients of the result are not quantized. x is [b, t, k], or rows [m, k] of groups.
    """

    def with_gradient_of(value: jax.Array, at: jax.Array) -> jax.Array:
        return jax.lax.stop_gradient(value) + (at - jax.lax.stop_gradient(at))

    exact = quantize(x, ROWS, weight.scheme).dequantized(jnp.float32)
    left = with_gradient_of(exact, x.astype(jnp.float32))
    right = with_gradient_of(weight.dequantized(jnp.float32), gradient_of.astype(jnp.float32))
    if group_sizes is not None:
        return gmm(left, right, group_sizes, backend="reference").astype(x.dtype)
    spec = "btk,bkn->btn" if right.ndim == 3 else "btk,kn->btn"
    return jnp.einsum(spec, left, right, precision=jax.lax.Precision.HIGHEST).astype(x.dtype)
