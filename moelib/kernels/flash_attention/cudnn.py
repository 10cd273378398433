"""Attention by cuDNN, through `jax.nn.dot_product_attention`: for NVIDIA GPUs, on request.

It is not the default, because JAX looks for cuDNN while the program is traced, which fails on a
machine without it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moelib.core.errors import UserError
from moelib.kernels.backend import how_to_set
from moelib.kernels.flash_attention.reference import MaskSpec, Positions
from moelib.kernels.operands import of_one_width

_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
_MAX_HEAD_DIM = 128  # 256 since Hopper.


def reason_against(
    q: Float[Array, "B S H Dh"],
    v: Float[Array, "B S G Dv"],
    segment_ids: Int[Array, "B S"] | None,
    sinks: Float[Array, "H"] | None,
    spec: MaskSpec,
) -> str | None:
    """Returns why cuDNN cannot take these operands and what to do, or None if it can."""
    length, dim = q.shape[1], max(q.shape[3], v.shape[3])
    if q.dtype not in _DTYPES:
        return f"takes bfloat16 and float16, not {q.dtype}; cast to one of them."
    if dim % 8 or dim > _MAX_HEAD_DIM:
        nearest = min(_MAX_HEAD_DIM, max(8, 8 * round(dim / 8)))
        return (
            f"takes a head_dim that is a multiple of 8 up to {_MAX_HEAD_DIM}, not {dim}; set "
            f"{nearest}."
        )
    if sinks is not None:
        return "takes no sinks; unset them."
    if spec.logit_cap is not None:
        return f"takes no cap; set logit_cap={spec.logit_cap} to None."
    if segment_ids is not None and length % 2:
        return f"takes segments only in sequences of even length, not {length}; set {length + 1}."
    return None


def attention(
    q: Float[Array, "B S H Dh"],
    k: Float[Array, "B S G Dh"],
    v: Float[Array, "B S G Dv"],
    sinks: None,
    positions: Positions,
    *,
    spec: MaskSpec,
) -> Float[Array, "B S H Dv"]:
    """Returns attention over whole sequences. Segments become a mask [B, 1, S, S].

    Raises:
        UserError: If cuDNN is not installed.
    """
    del sinks
    v_dim, (q, k, v) = v.shape[3], of_one_width(q, k, v)
    mask = None
    if (segment_ids := positions.q_segments) is not None:
        mask = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
    try:
        out = jax.nn.dot_product_attention(
            q,
            k,
            v,
            mask=mask,
            scale=spec.scale,
            is_causal=spec.causal,
            local_window_size=None if spec.window is None else (spec.window - 1, 0),
            implementation="cudnn",
        )
    except RuntimeError as error:
        raise UserError(
            f"flash_attention: backend 'cudnn' needs cuDNN: {error} Install nvidia-cudnn-cu13, or "
            f"{how_to_set('flash_attention', 'xla')}."
        ) from error
    return out[..., :v_dim]
