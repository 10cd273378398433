"""Matmuls of quantized arrays by their definition, in float32."""

from typing import Any

import jax
import jax.numpy as jnp

from moelib.kernels.quantized_matmul.quantize import Quantized


def dot(spec: str, a: Quantized, b: Quantized, *, dtype: Any) -> jax.Array:
    """Returns the einsum of the arrays that two quantized arrays stand for."""
    operands = (x.dequantized(jnp.float32) for x in (a, b))
    return jnp.einsum(spec, *operands, precision=jax.lax.Precision.HIGHEST).astype(dtype)
