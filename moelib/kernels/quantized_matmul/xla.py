"""Matmuls of quantized arrays in the dtype of activations, in which their values are exact.

Weights are read, gathered and kept in 8 bits; a compiler fuses the casts into the dot. A matmul in
blocks by dots of 8 bits reads and writes its sums once per block of 128, which costs more than the
units for 8 bits gain.
"""

from typing import Any

import jax
import jax.numpy as jnp

from moelib.kernels.quantized_matmul.quantize import Quantized


def dot(spec: str, a: Quantized, b: Quantized, *, dtype: Any, values: Any = None) -> jax.Array:
    """Returns an einsum of the exact values of two quantized arrays, in `values` if not None."""
    operands = (exact(x, dtype if values is None else values) for x in (a, b))
    return jnp.einsum(spec, *operands, preferred_element_type=dtype).astype(dtype)


def exact(x: Quantized, dtype: Any) -> jax.Array:
    """Returns the values of a quantized array: in bfloat16 if that is `dtype`, else in float32."""
    return x.dequantized(jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32)
