"""Attention by cuDNN, through `jax.nn.dot_product_attention`: for NVIDIA GPUs, when asked for.

It cannot be a platform's own backend that is chosen at lowering: JAX looks for cuDNN when the
program is traced, which fails on a machine without it. What is not finite in one token may reach
all rows of its block.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moelib.kernels.flash_attention.reference import MaskSpec

_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
_MAX_HEAD_DIM = 128  # 256 since Hopper.


def reason_against(
    q: Float[Array, "B S H Dh"],
    segment_ids: Int[Array, "B S"] | None,
    sinks: Float[Array, "H"] | None,
    spec: MaskSpec,
) -> str | None:
    """Returns why cuDNN cannot take these operands and what it can, or None if it can."""
    dim = q.shape[3]
    if q.dtype not in _DTYPES:
        return f"the dtype is {q.dtype}; cuDNN takes bfloat16 and float16"
    if dim % 8 or dim > _MAX_HEAD_DIM:
        nearest = min(_MAX_HEAD_DIM, max(8, 8 * round(dim / 8)))
        return (
            f"head_dim is {dim}; cuDNN takes multiples of 8 up to {_MAX_HEAD_DIM}, {nearest} is "
            "the nearest"
        )
    if segment_ids is not None:
        return "there are segment_ids; cuDNN takes them only as a mask of the sequence squared"
    if sinks is not None:
        return "there are sinks; cuDNN has none here"
    if spec.logit_cap is not None:
        return f"logit_cap is {spec.logit_cap}; cuDNN has none here"
    return None


def attention(
    q: Float[Array, "B S H Dh"],
    k: Float[Array, "B S G Dh"],
    v: Float[Array, "B S G Dh"],
    spec: MaskSpec,
) -> Float[Array, "B S H Dh"]:
    """Returns attention over whole sequences.

    Raises:
        RuntimeError: By JAX, without cuDNN.
    """
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=spec.scale,
        is_causal=spec.causal,
        local_window_size=None if spec.window is None else (spec.window - 1, 0),
        implementation="cudnn",
    )
