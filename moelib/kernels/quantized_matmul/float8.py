"""Matmuls of quantized arrays by dots of their 8-bit values, summed in float32.

For schemes with one scale per array: XLA has no dot with a scale per block, and a dot for each
block that is summed over reads and writes the sums each time.
"""

from typing import Any

import jax
import jax.numpy as jnp

from moelib.kernels.quantized_matmul.quantize import Quantized


def dot(spec: str, a: Quantized, b: Quantized, *, dtype: Any) -> jax.Array:
    """Returns an einsum of two quantized arrays, each of one scale, or of one per group."""
    sums = jnp.einsum(spec, a.values, b.values, preferred_element_type=jnp.float32)
    first, second = (x.scales.reshape(-1, *[1] * (sums.ndim - 1)) for x in (a, b))
    return (sums * (first * second)).astype(dtype)
