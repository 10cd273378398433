"""Matmuls of quantized arrays by dots of their 8-bit values, one per block that is summed over.

Products of a block are summed in float32 (int8: in int32), times the scales of both operands.
"""

import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from moelib.kernels.quantized_matmul.quantize import BLOCK, Quantized


def dot(spec: str, a: Quantized, b: Quantized, *, dtype: Any) -> jax.Array:
    """Returns an einsum of two quantized arrays, which may contract a batch dimension too."""
    inputs, out = spec.split("->")
    names = inputs.split(",")
    *batch, inner = (name for name in names[0] if name in names[1] and name not in out)
    parts = [_blocks(x, each, inner, batch) for x, each in zip((a, b), names, strict=True)]
    # One step per block, and per element of a batch dimension.
    spec = ",".join(each.translate({ord(name): None for name in batch}) for each in names)
    names = spec.split(",")
    outer = lambda each: each.replace(inner, "")

    def step(total: Any, operands: Any) -> tuple[jax.Array, None]:
        (x, x_scales), (y, y_scales) = operands
        sums = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
        product = jnp.einsum(f"{spec}->{out}", x, y, preferred_element_type=sums)
        scales = jnp.einsum(f"{outer(names[0])},{outer(names[1])}->{out}", x_scales, y_scales)
        return total + product.astype(jnp.float32) * scales, None

    first, rest = (jax.tree.map(operator.itemgetter(i), parts) for i in (0, slice(1, None)))
    start, _ = step(jnp.zeros((), jnp.float32), first)
    num_blocks = len(jax.tree.leaves(parts)[0])
    total = start if num_blocks == 1 else lax.scan(step, start, rest)[0]
    return total.astype(dtype)


def _blocks(x: Quantized, names: str, inner: str, batch: list[str]) -> tuple[jax.Array, jax.Array]:
    """Returns the operands of all steps, values [steps, ...] and scales without `inner`."""
    axis = names.index(inner)
    size, width = x.values.shape[axis], BLOCK if x.scheme.format.in_blocks else None
    width = size if width is None or size <= width else width
    num = -(-size // width)
    pad = [(0, num * width - size) if i == axis else (0, 0) for i in range(len(names))]
    values = jnp.pad(x.values, pad)
    values = values.reshape(*values.shape[:axis], num, width, *values.shape[axis + 1 :])
    scales = x.expanded_scales(*(i for i in range(len(names)) if i != axis)).astype(jnp.float32)
    shape = tuple(num if i == axis else n for i, n in enumerate(x.values.shape))
    scales = jnp.broadcast_to(scales, shape)
    first = [names.index(name) for name in batch]
    moved = [values, scales]
    for i, array in enumerate(moved):
        array = jnp.moveaxis(array, [*first, axis], range(len(first) + 1))
        moved[i] = array.reshape(-1, *array.shape[len(first) + 1 :])
    return moved[0], moved[1]
