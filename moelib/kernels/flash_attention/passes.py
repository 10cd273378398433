"""The forward and the backward pass of attention, of whole sequences and of shards of them.

In ring attention each device holds a shard of the queries of a sequence and receives the shards of
keys one after the other:

    part = attention_forward(q, k, v, positions, spec)  # For the first shard of keys,
    part = merge(part, attention_forward(q, k, v, positions, spec))  # and for every other one.
    out, lse = add_sinks(part, sinks)
    ...
    grads = attention_backward(q, k, v, out, lse, grad, positions, spec)  # For every shard.

The gradients of a shard are sums over the shards that it met: those of q stay on their device,
those of k and v travel with them. Positions may come in any order, so a sequence can be split in
zigzag. Results for shards are in float32, to be summed.

Source: Liu et al., Ring Attention, arXiv:2310.01889.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from moelib.kernels import backend as backends
from moelib.kernels.flash_attention import gpu, reference, tpu, xla
from moelib.kernels.flash_attention.reference import MaskSpec, Positions
from moelib.kernels.operands import check_dtypes, check_shapes

Part = tuple[Float32[Array, "B Q H Dv"], Float32[Array, "B H Q"]]  # Output and logsumexp.
_FORMS = {"xla": xla, "tpu": tpu, "gpu": gpu}


def attention_forward(
    q: Float[Array, "B Q H Dh"],
    k: Float[Array, "B K G Dh"],
    v: Float[Array, "B K G Dv"],
    positions: Positions,
    spec: MaskSpec,
    *,
    backend: str | None = None,
) -> Part:
    """Returns the attention of a shard of queries to a shard of keys, and the logsumexp of scores.

    A query that sees none of the keys gives zeros, and a logsumexp that changes no `merge`. The
    arguments are those of `flash_attention`; positions have segments of both shards, or of neither;
    the backend is "gpu", "tpu" or "xla".

    Raises:
        ValueError: If the operands do not fit `flash_attention`, or only one side has segments.
    """
    check(q, k, v, positions, spec)
    segments = {"q_segments": positions.q_segments, "k_segments": positions.k_segments}
    named = {"q": q, "k": k, "v": v, **segments}
    backends.record("flash_attention", attention_of_shards, named, spec=spec)
    backend = backends.chosen_backend("flash_attention", backend)
    return run("forward", backend, (q, k, v, None, positions), spec, in_order=False)


def merge(a: Part, b: Part) -> Part:
    """Returns the attention of the same queries to the keys of both parts, which share none."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    lse = jnp.logaddexp(lse_a, lse_b)
    return out_a * _weight(lse_a - lse) + out_b * _weight(lse_b - lse), lse


def add_sinks(part: Part, sinks: Float[Array, "H"]) -> Part:
    """Returns the part with one more score per head in its softmax, which has no value.

    To be called once, after all keys.
    """
    out, lse = part
    total = jnp.logaddexp(lse, sinks.astype(lse.dtype)[None, :, None])
    return out * _weight(lse - total), total


def _weight(log: Float32[Array, "B H Q"]) -> Float32[Array, "B Q H 1"]:
    return jnp.exp(log).transpose(0, 2, 1)[..., None]


def attention_backward(
    q: Float[Array, "B Q H Dh"],
    k: Float[Array, "B K G Dh"],
    v: Float[Array, "B K G Dv"],
    out: Float[Array, "B Q H Dv"],
    lse: Float32[Array, "B H Q"],
    grad: Float[Array, "B Q H Dv"],
    positions: Positions,
    spec: MaskSpec,
    *,
    backend: str | None = None,
) -> tuple[Float32[Array, "B Q H Dh"], Float32[Array, "B K G Dh"], Float32[Array, "B K G Dv"]]:
    """Returns the contribution of a shard of queries and one of keys to the gradients in q, k, v.

    `out` and `lse` are the attention of the queries to the keys of all shards, sinks included, and
    `grad` is the gradient of `out`. The rest is as for `attention_forward`.
    """
    check(q, k, v, positions, spec)
    backend = backends.chosen_backend("flash_attention", backend)
    grad, delta = grad.astype(q.dtype), output_times_gradient(out, grad)
    return run("backward", backend, (q, k, v, lse, delta, grad, positions), spec, in_order=False)


def attention_of_shards(
    q: Float[Array, "B Q H Dh"],
    k: Float[Array, "B K G Dh"],
    v: Float[Array, "B K G Dv"],
    q_segments: Int[Array, "B Q"] | None = None,
    k_segments: Int[Array, "B K"] | None = None,
    *,
    spec: MaskSpec,
) -> Float32[Array, "B Q H Dv"]:
    """Returns the attention of a shard of queries in zigzag to one of keys; differentiable.

    Both passes are those above, or their definition by the backend "reference". For comparisons: in
    a ring the logsumexp of all shards enters the backward pass.
    """
    half, index = q.shape[1] // 2, jnp.arange(q.shape[1], dtype=jnp.int32)
    positions = Positions(
        jnp.where(index < half, index, index + k.shape[1] - half // 2),
        jnp.arange(k.shape[1], dtype=jnp.int32) + half // 2,  # Some queries see a part of them.
        q_segments,
        k_segments,
    )
    if backends.chosen_backend("flash_attention") == "reference":
        return reference.attention(q, k, v, None, positions, spec=spec)

    @jax.custom_vjp
    def attend(q: Array, k: Array, v: Array) -> Array:
        return attention_forward(q, k, v, positions, spec)[0]

    def forward(q: Array, k: Array, v: Array) -> Any:
        out, lse = attention_forward(q, k, v, positions, spec)
        return out, (q, k, v, out, lse)

    def backward(saved: Any, grad: Array) -> Any:
        q, k, v, out, lse = saved
        grads = attention_backward(q, k, v, out, lse, grad, positions, spec)
        return tuple(x.astype(q.dtype) for x in grads)

    attend.defvjp(forward, backward)
    return attend(q, k, v)


def output_times_gradient(
    out: Float[Array, "B Q H Dv"], grad: Float[Array, "B Q H Dv"]
) -> Float32[Array, "B H Q"]:
    """Returns delta, the sum over Dv of output times gradient."""
    product = out.astype(jnp.float32) * grad.astype(jnp.float32)
    return jnp.sum(product, axis=-1).transpose(0, 2, 1)


def sinks_gradient(
    sinks: Float[Array, "H"], lse: Float32[Array, "B H Q"], delta: Float32[Array, "B H Q"]
) -> Float[Array, "H"]:
    """Returns the queries' contribution to the sinks' gradient.

    Each sink takes a share of the softmax of every query, for no value.
    """
    share = jnp.exp(sinks.astype(jnp.float32)[None, :, None] - lse)
    return -jnp.sum(share * delta, axis=(0, 2)).astype(sinks.dtype)


# ------------------------------------------------------------------------------------------------
# Whole sequences and shards


def check(
    q: Float[Array, "B Q H Dh"],
    k: Float[Array, "B K G Dh"],
    v: Float[Array, "B K G Dv"],
    positions: Positions,
    spec: MaskSpec,
    *,
    sinks: Float[Array, "H"] | None = None,
    whole: bool = False,
) -> None:
    """Raises ValueError for operands that no backend takes.

    With `whole`, queries and keys must be of one whole sequence.
    """
    keys = "Q" if whole else "K"
    shapes = {
        "q": (q, "BQHD"),
        "k": (k, f"B{keys}GD"),
        "v": (v, f"B{keys}GV"),
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
    if (positions.q_segments is None) != (positions.k_segments is None):
        with_segments = "keys" if positions.q_segments is None else "queries"
        raise ValueError(
            f"flash_attention: only the {with_segments} have segments; give both, or neither."
        )


def run(
    part: str, backend: str | None, operands: tuple[Any, ...], spec: MaskSpec, *, in_order: bool
) -> Any:
    """Returns the result of `xla.forward` or `xla.backward`, on the backend or the default one."""
    q, k, v, *_ = operands
    reasons = {
        "tpu": tpu.reason_against(q, k, v, spec, in_order=in_order),
        "gpu": gpu.reason_against(q, v),
    }
    if backend is None:
        reasons = {name: reason or _reason_of_mesh() for name, reason in reasons.items()}
        if reasons["gpu"] is not None:
            reasons["gpu"] += _COST
    forms = {
        name: functools.partial(getattr(module, part), spec=spec, in_order=in_order)
        for name, module in _FORMS.items()
    }
    return backends.run("flash_attention", backend, forms, reasons, *operands)


# 36.4 and 0.44 GiB for one sequence of 4,096 tokens, 32/4 heads of 128, with gradients; 26 times as
# many, the least, for 1,003 tokens of 4 heads with a window of 500.
_COST = (
    " Plain XLA moves 25 to 80 times as many bytes. cuDNN's kernel (flash_attention=cudnn) takes "
    "whole sequences without sinks and logit_cap."
)


def _reason_of_mesh() -> str | None:
    """Returns why a Pallas kernel cannot be used here, or None: XLA does not partition it."""
    mesh = jax.sharding.get_abstract_mesh()
    manual = jax.sharding.AxisType.Manual
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    split = [name for name, kind in kinds if kind != manual and mesh.shape[name] > 1]
    if split:
        return f"needs manual mesh axes, not {', '.join(split)}; call it inside jax.shard_map."
    return None
