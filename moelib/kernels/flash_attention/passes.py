"""The forward and the backward pass of attention, on the backend that is set or the default one."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from moelib.kernels import backend as backends
from moelib.kernels.flash_attention import tpu, xla
from moelib.kernels.flash_attention.reference import MaskSpec, Positions
from moelib.kernels.operands import check_dtypes, check_shapes

_FORMS = {"xla": xla, "tpu": tpu}


def check(
    q: Float[Array, "B Q H Dh"],
    k: Float[Array, "B K G Dh"],
    v: Float[Array, "B K G Dh"],
    positions: Positions,
    spec: MaskSpec,
    *,
    sinks: Float[Array, "H"] | None = None,
    whole: bool,
) -> None:
    """Raises ValueError for operands that no backend takes.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        positions: Positions and segments of queries and keys.
        spec: Scale, causality, window and cap of the scores.
        sinks: One more score per head, or None.
        whole: Whether queries and keys are of one whole sequence.
    """
    keys = "Q" if whole else "K"
    shapes = {
        "q": (q, "BQHD"),
        "k": (k, f"B{keys}GD"),
        "v": (v, f"B{keys}GD"),
        "q_index": (positions.q_index, "Q"),
        "k_index": (positions.k_index, keys),
        "segment_ids": (positions.q_segments, "BQ"),
        "segment_ids of keys": (positions.k_segments, f"B{keys}"),
        "sinks": (sinks, "H"),
    }
    check_shapes("flash_attention", shapes)
    check_dtypes("flash_attention", {"q": q, "k": k, "v": v}, positions._asdict())
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"flash_attention: {q.shape[2]} query heads do not divide into {k.shape[2]} groups; "
            "num_heads must be a multiple of num_kv_heads."
        )
    if spec.window is not None and (spec.window < 1 or not spec.causal):
        raise ValueError(
            f"flash_attention: window={spec.window} with causal={spec.causal}: a window looks back "
            "and has at least the token itself; set 1 or more with causal=True, or None."
        )
    if spec.logit_cap is not None and not spec.logit_cap > 0:
        raise ValueError(
            f"flash_attention: logit_cap={spec.logit_cap}: set a number above 0, or None."
        )


def forward(
    backend: str | None,
    q: Float[Array, "B Q H Dh"],
    k: Float[Array, "B K G Dh"],
    v: Float[Array, "B K G Dh"],
    sinks: Float[Array, "H"] | None,
    positions: Positions,
    spec: MaskSpec,
    *,
    in_order: bool,
) -> tuple[Float[Array, "B Q H Dh"], Float32[Array, "B H Q"]]:
    """Returns attention and the logsumexp of each query's scores, as `xla.forward`."""
    return _run("forward", backend, (q, k, v, sinks, positions), spec, in_order)


def backward(
    backend: str | None,
    q: Float[Array, "B Q H Dh"],
    k: Float[Array, "B K G Dh"],
    v: Float[Array, "B K G Dh"],
    lse: Float32[Array, "B H Q"],
    delta: Float32[Array, "B H Q"],
    grad: Float[Array, "B Q H Dh"],
    positions: Positions,
    spec: MaskSpec,
    *,
    in_order: bool,
) -> tuple[Array, Array, Array]:
    """Returns the gradients in q, k and v, as `xla.backward`."""
    return _run("backward", backend, (q, k, v, lse, delta, grad, positions), spec, in_order)


def _run(
    part: str, backend: str | None, operands: tuple[Any, ...], spec: MaskSpec, in_order: bool
) -> Any:
    reason = tpu.reason_against(operands[0], operands[1], spec, in_order=in_order)
    if backend == "tpu" and reason:
        raise backends.BackendError(
            f"flash_attention: backend 'tpu' {reason} Or "
            f"{backends.how_to_set('flash_attention', 'xla')}."
        )
    forms = {
        name: functools.partial(getattr(module, part), spec=spec, in_order=in_order)
        for name, module in _FORMS.items()
    }
    defaults = _defaults(reason or _reason_of_mesh()) if backend is None else {}
    return backends.run("flash_attention", backend, forms, defaults, *operands)


def _defaults(reason: str | None) -> dict[str, str]:
    """Returns the backend by platform, and reports a slow one; the reason is against the TPU's."""
    device = backends.current_device()
    if device.platform == "gpu":
        backends.warn_once(
            f"flash_attention runs in plain XLA on {device.kind}, which is slow: this library has "
            "no kernel for GPUs. For cuDNN's, which takes whole sequences in bfloat16 or float16 "
            f"without sinks and logit_cap, {backends.how_to_set('flash_attention', 'cudnn')}."
        )
    if device.platform == "tpu" and reason:
        backends.warn_once(
            f"flash_attention runs in plain XLA on {device.kind}, which is slow: the kernels for "
            f"TPUs {reason} To run it so without this warning, "
            f"{backends.how_to_set('flash_attention', 'xla')}."
        )
    return {"default": "xla"} if reason else {"default": "xla", "tpu": "tpu"}


def _reason_of_mesh() -> str | None:
    """Returns why a Pallas kernel cannot be used here, or None: XLA does not partition it."""
    mesh = jax.sharding.get_abstract_mesh()
    manual = jax.sharding.AxisType.Manual
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    split = [name for name, kind in kinds if kind != manual and mesh.shape[name] > 1]
    if split:
        return f"need manual mesh axes, not {', '.join(split)}; call it inside of jax.shard_map."
    return None


def output_times_gradient(
    out: Float[Array, "B Q H Dh"], grad: Float[Array, "B Q H Dh"]
) -> Float32[Array, "B H Q"]:
    """Returns delta, the sum over Dh of output times gradient."""
    product = out.astype(jnp.float32) * grad.astype(jnp.float32)
    return jnp.sum(product, axis=-1).transpose(0, 2, 1)


def sinks_gradient(
    sinks: Float[Array, "H"], lse: Float32[Array, "B H Q"], delta: Float32[Array, "B H Q"]
) -> Float[Array, "H"]:
    """Returns the gradient in the sinks, each of which takes a share of a softmax for no value."""
    share = jnp.exp(sinks.astype(jnp.float32)[None, :, None] - lse)
    return -jnp.sum(share * delta, axis=(0, 2)).astype(sinks.dtype)
