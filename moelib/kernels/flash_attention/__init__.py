"""Attention: softmax(scale q k^T) v with grouped key and value heads.

`flash_attention` is the one entry for whole sequences; `passes` has the parts of attention over a
sequence that is split over devices. `reference` is the definition; `xla` computes it in blocks of
queries, with memory linear in the sequence, on every platform; `tpu` and `gpu` in Pallas kernels,
the latter on Hopper; `cudnn` on NVIDIA GPUs, on request.

With several devices the kernels belong inside `jax.shard_map`: XLA does not partition them, so the
default is the xla form where a mesh axis is not manual.
"""

import functools
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moelib.core.varying import align
from moelib.kernels import backend as backends
from moelib.kernels.flash_attention import cudnn, passes, reference
from moelib.kernels.flash_attention.reference import (
    EMPTY,
    MaskSpec,
    Positions,
    capped,
    whole_sequences,
)

__all__ = ["CONTEXT", "EMPTY", "MaskSpec", "Positions", "capped", "flash_attention"]

CONTEXT = "attention_context"  # Name of output and logsumexp for `jax.checkpoint` policies.


def flash_attention(
    q: Float[Array, "B S H Dh"],
    k: Float[Array, "B S G Dh"],
    v: Float[Array, "B S G Dv"],
    spec: MaskSpec,
    *,
    segment_ids: Int[Array, "B S"] | None = None,
    sinks: Float[Array, "H"] | None = None,
    backend: str | None = None,
) -> Float[Array, "B S H Dv"]:
    """Returns attention over whole sequences, in the dtype of v.

    Differentiable in q, k, v and sinks, in reverse mode, once; for second derivatives take the
    backend "reference". A policy of `jax.checkpoint` that saves the name `CONTEXT` saves all that
    the backward pass needs in addition to the operands.

    Args:
        q: Queries. Head h attends with key and value head h // (H / G).
        k: Keys.
        v: Values, of the same width Dh or of another one.
        spec: Scale, causality, window and cap of the scores.
        segment_ids: Tokens attend only inside their segment; None for one segment per sequence.
        sinks: One more score per head, which takes its share of the softmax and has no value.
        backend: "tpu" (Pallas kernels, the default on TPUs for a head_dim that is a multiple of 16
            from 64 on), "gpu" (Pallas kernels, the default on Hopper for bfloat16 and float16 and a
            head_dim of 64, 128, 192 or 256), "xla" (the default elsewhere), "cudnn" (on NVIDIA
            GPUs, for bfloat16 and float16, without sinks and cap; segment_ids cost a mask
            [B, 1, S, S]), or "reference". None takes the one that `moelib.kernels.backend` names.

    Raises:
        ValueError: If the shapes or dtypes disagree, H is not a multiple of G, window is below 1 or
            not causal, logit_cap is not positive, or the backend is unknown or cannot take the
            operands.

    Source: Vaswani et al., arXiv:1706.03762, eq. 1; grouped heads: Ainslie et al.,
    arXiv:2305.13245; in blocks: Dao et al., arXiv:2205.14135; window: Beltagy et al.,
    arXiv:2004.05150; logit cap: Gemma 2, arXiv:2408.00118; sinks: GPT-OSS, arXiv:2508.10925.
    """
    backend = backends.chosen_backend("flash_attention", backend)
    positions = whole_sequences(q.shape[1], segment_ids)
    passes.check(q, k, v, positions, spec, sinks=sinks, whole=True)
    named = {"q": q, "k": k, "v": v, "sinks": sinks, "segment_ids": segment_ids}
    backends.record("flash_attention", flash_attention, named, spec=spec)
    if backend in ("cudnn", "reference"):
        forms = {"cudnn": cudnn.attention, "reference": reference.attention}
        forms = {name: functools.partial(form, spec=spec) for name, form in forms.items()}
        reasons = {"cudnn": cudnn.reason_against(q, v, segment_ids, sinks, spec)}
        operands = align(q, k, v, sinks, positions)
        return backends.run("flash_attention", backend, forms, reasons, *operands)
    return _attention(spec, backend, *align(q, k, v, sinks, segment_ids))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(spec: MaskSpec, backend: str | None, *operands: Any) -> Array:
    return _forward(spec, backend, *operands)[0]


def _forward(
    spec: MaskSpec,
    backend: str | None,
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None,
    segments: Array | None,
) -> tuple[Array, tuple]:
    positions = whole_sequences(q.shape[1], segments)
    operands = q, k, v, sinks, positions
    out, lse = passes.run("forward", backend, operands, spec, in_order=True)
    # If a policy saves both, the backward pass needs no second forward pass.
    out, lse = checkpoint_name(out, CONTEXT), checkpoint_name(lse, CONTEXT)
    return out, (q, k, v, sinks, segments, out, lse)


def _backward(spec: MaskSpec, backend: str | None, residuals: tuple, grad: Array) -> tuple:
    q, k, v, sinks, segments, out, lse = residuals
    positions = whole_sequences(q.shape[1], segments)
    delta = passes.output_times_gradient(out, grad)
    operands = q, k, v, lse, delta, grad, positions
    grads = passes.run("backward", backend, operands, spec, in_order=True)
    sinks_grad = None if sinks is None else passes.sinks_gradient(sinks, lse, delta)
    return *grads, sinks_grad, None


_attention.defvjp(_forward, _backward)
