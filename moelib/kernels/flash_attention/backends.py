"""The forms of attention that have a forward and a backward pass, and the choice of one."""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from moelib.kernels.backend import check_backend, run_on_backend
from moelib.kernels.flash_attention import tpu, xla
from moelib.kernels.flash_attention.reference import MaskSpec, Places

_logger = logging.getLogger(__name__)
_BACKENDS = {"xla": xla, "tpu": tpu}


def check_shapes(
    q: Float[Array, "B Q H Dh"],
    k: Float[Array, "B K G Dh"],
    v: Float[Array, "B K G Dh"],
    q_segments: Int[Array, "B Q"] | None,
    k_segments: Int[Array, "B K"] | None,
    *,
    in_order: bool,
) -> None:
    """Raises ValueError unless the operands fit together; arguments as for `check`."""
    if q.ndim != 4 or k.ndim != 4:
        raise ValueError(
            f"flash_attention: q {q.shape} and k {k.shape} must be [B, S, H, Dh] and [B, S, G, Dh]."
        )
    (batch, queries, heads, dim), (_, keys, groups, _) = q.shape, k.shape
    if 0 in (batch, heads, groups, dim):
        raise ValueError(
            f"flash_attention: q {q.shape} and k {k.shape} have a size of 0; set batch, heads and "
            "head_dim to 1 or more."
        )
    want = batch, queries if in_order else keys, groups, dim
    for name, x in (("k", k), ("v", v)):
        if x.shape != want:
            raise ValueError(
                f"flash_attention: {name} has shape {x.shape}; to q {q.shape} and the {groups} "
                f"heads of k it must be {want}."
            )
    for name, ids, length in (("q", q_segments, queries), ("k", k_segments, want[1])):
        if ids is None:
            continue
        if ids.shape != (batch, length) or not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ValueError(
                f"flash_attention: the segment_ids of {name} are {ids.dtype}{list(ids.shape)}; "
                f"they must be integers, [{batch}, {length}]."
            )


def check(
    backend: str | None,
    q: Float[Array, "B Q H Dh"],
    k: Float[Array, "B K G Dh"],
    v: Float[Array, "B K G Dh"],
    spec: MaskSpec,
    *,
    in_order: bool,
    also: tuple[str, ...] = (),
) -> None:
    """Raises ValueError for what no backend can do, or not the one asked for.

    Args:
        backend: One of the forms here, or of the names in `also`, or None.
        q: Queries.
        k: Keys.
        v: Values.
        spec: How scores are made.
        in_order: Whether queries and keys are the same sequence.
        also: Further backends.
    """
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"flash_attention: {q.shape[2]} query heads do not divide into {k.shape[2]} groups; "
            "num_heads must be a multiple of num_kv_heads."
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"flash_attention: q is {q.dtype}, k is {k.dtype} and v is {v.dtype}; cast them to one "
            "dtype."
        )
    if spec.window is not None and spec.window < 1:
        raise ValueError(
            f"flash_attention: window is {spec.window}; a token sees at least itself, so set 1 or "
            "more, or None for no window."
        )
    if spec.window is not None and not spec.causal:
        raise ValueError(
            f"flash_attention: window is {spec.window} with causal=False; a window looks back "
            "only, so set causal=True, or window=None."
        )
    if spec.logit_cap is not None and not spec.logit_cap > 0:
        raise ValueError(
            f"flash_attention: logit_cap is {spec.logit_cap}; set a number above 0, or None for no "
            "cap."
        )
    check_backend("flash_attention", backend, {**_BACKENDS, **dict.fromkeys(also)})
    if backend == "tpu" and (reason := tpu.reason_against(q, k, spec, in_order=in_order)):
        raise ValueError(f'flash_attention: {reason}; or set backend="xla".')


def forward(
    backend: str | None,
    q: Float[Array, "B Q H Dh"],
    k: Float[Array, "B K G Dh"],
    v: Float[Array, "B K G Dh"],
    sinks: Float[Array, "H"] | None,
    places: Places,
    spec: MaskSpec,
    *,
    in_order: bool,
) -> tuple[Float[Array, "B Q H Dh"], Float32[Array, "B H Q"]]:
    """Returns attention and the logsumexp of each query's scores, as `xla.forward` does."""
    operands = q, k, v, sinks, places
    return _run("forward", backend, operands, spec=spec, in_order=in_order)


def backward(
    backend: str | None,
    q: Float[Array, "B Q H Dh"],
    k: Float[Array, "B K G Dh"],
    v: Float[Array, "B K G Dh"],
    lse: Float32[Array, "B H Q"],
    delta: Float32[Array, "B H Q"],
    grad: Float[Array, "B Q H Dh"],
    places: Places,
    spec: MaskSpec,
    *,
    in_order: bool,
) -> tuple[Array, Array, Array]:
    """Returns the gradients in q, k and v, as `xla.backward` does."""
    operands = q, k, v, lse, delta, grad, places
    return _run("backward", backend, operands, spec=spec, in_order=in_order)


def _run(pass_: str, backend: str | None, operands: tuple[Any, ...], **options: Any) -> Any:
    runs: dict[str, Callable[..., Any]] = {
        name: functools.partial(getattr(module, pass_), **options)
        for name, module in _BACKENDS.items()
    }
    if backend == "tpu":  # Asked for by name: on a CPU, tests do that.
        interpreted = functools.partial(runs["tpu"], interpret=True)
        return lax.platform_dependent(*operands, tpu=runs["tpu"], cpu=interpreted)
    platforms = _platforms(*operands[:2], **options)
    return run_on_backend("flash_attention", backend, runs, platforms, *operands)


def _platforms(q: Array, k: Array, spec: MaskSpec, in_order: bool) -> Mapping[str, str]:
    """Returns each platform's backend for these operands; why a slower one, is logged."""
    if _is_for_gpu():
        _log_once(
            "flash_attention takes the xla form on GPUs: there is no kernel of ours for them; "
            'backend="cudnn" takes attention without sinks, segment_ids and logit_cap.'
        )
        return {"default": "xla"}
    reason = tpu.reason_against(q, k, spec, in_order=in_order) or _reason_of_mesh()
    if reason:
        _log_once(f"flash_attention takes the xla form on TPUs: {reason}.")
        return {"default": "xla"}
    return {"tpu": "tpu", "default": "xla"}


def _is_for_gpu() -> bool:
    """Returns whether the mesh in context is one of GPUs, or else the default device is one."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (jax.default_backend() if device is None else device.platform) in ("gpu", "cuda")


def _reason_of_mesh() -> str | None:
    """Returns why a Pallas kernel cannot be used here, or None: XLA does not partition it."""
    mesh = jax.sharding.get_abstract_mesh()
    manual = jax.sharding.AxisType.Manual
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    split = [name for name, kind in kinds if kind != manual and mesh.shape[name] > 1]
    if split:
        return f"the mesh axes {', '.join(split)} are not manual; call it inside of jax.shard_map"
    return None


@functools.cache
def _log_once(message: str) -> None:
    _logger.info(message)


def output_times_gradient(
    out: Float[Array, "B Q H Dh"], grad: Float[Array, "B Q H Dh"]
) -> Float32[Array, "B H Q"]:
    """Returns delta, the sum over Dh of output times gradient."""
    product = out.astype(jnp.float32) * grad.astype(jnp.float32)
    return jnp.sum(product, axis=-1).transpose(0, 2, 1)


def sinks_gradient(
    sinks: Float[Array, "H"], lse: Float32[Array, "B H Q"], delta: Float32[Array, "B H Q"]
) -> Float[Array, "H"]:
    """Returns the gradient in the sinks: each takes its share of a row's softmax, for no value."""
    share = jnp.exp(sinks.astype(jnp.float32)[None, :, None] - lse)
    return -jnp.sum(share * delta, axis=(0, 2)).astype(sinks.dtype)
