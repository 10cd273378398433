"""Attention: softmax(scale q k^T) v with grouped key and value heads.

`flash_attention` is the one entry for whole sequences; `shards` has the building blocks of a
sequence that is split over devices. `reference` says what attention means; `xla` computes it in
blocks of queries, memory linear in the sequence, on every platform; `tpu` in Pallas kernels.

With several devices the kernels belong inside of `jax.shard_map`: XLA does not partition them, and
takes the xla form where a mesh axis is left to it.
"""

import functools

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moelib.core.varying import align
from moelib.kernels.flash_attention import backends, cudnn, reference
from moelib.kernels.flash_attention.reference import EMPTY, MaskSpec, whole_rows

__all__ = ["CONTEXT", "EMPTY", "MaskSpec", "flash_attention"]

CONTEXT = "attention_context"  # What `jax.checkpoint` policies call the output and its logsumexp.


def flash_attention(
    q: Float[Array, "B S H Dh"],
    k: Float[Array, "B S G Dh"],
    v: Float[Array, "B S G Dh"],
    segment_ids: Int[Array, "B S"] | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    sinks: Float[Array, "H"] | None = None,
    logit_cap: float | None = None,
    scale: float | None = None,
    backend: str | None = None,
) -> Float[Array, "B S H Dh"]:
    """Returns attention over whole sequences, in the dtype of v.

    Differentiable in q, k, v and sinks, in reverse mode, once; for second derivatives take the
    backend "reference". A policy of `jax.checkpoint` that keeps the name `CONTEXT` keeps what the
    backward pass needs beside the operands. What is not finite in one token makes NaN of the tokens
    that may attend to it, and of nothing else.

    Args:
        q: Queries. Head h attends with key and value head h // (H / G).
        k: Keys.
        v: Values.
        segment_ids: Tokens attend only inside their segment; None for one segment a row.
        causal: Whether a token attends only to itself and to what stands before it.
        window: How many tokens a token sees, itself and those just before it; None for all.
        sinks: One more score for each head, which takes its share of the softmax and has no value.
        logit_cap: Scores become cap * tanh(scores / cap), after the scale; None for no cap.
        scale: Multiplies the scores; 1 / sqrt(Dh) by default.
        backend: "tpu" (Pallas kernels, the default on TPUs where they can be used; interpreted on
            CPUs), "xla" (the default elsewhere), "cudnn" (on GPUs that have it; what is not finite
            may reach further there), or "reference".

    Raises:
        ValueError: If the shapes do not fit together, a size but S is 0, segment_ids are not
            integers, H is not a multiple of G, the operands' dtypes differ, window is below 1 or
            not causal, logit_cap is not positive, sinks are not one a head, the backend is
            unknown, or it cannot take the head_dim, dtype or length.

    Source: Vaswani et al., arXiv:1706.03762, eq. 1; grouped heads: Ainslie et al.,
    arXiv:2305.13245; in blocks: Dao et al., arXiv:2205.14135; window: Beltagy et al.,
    arXiv:2004.05150; logit cap: Gemma 2, arXiv:2408.00118; sinks: GPT-OSS, arXiv:2508.10925.
    """
    backends.check_shapes(q, k, v, segment_ids, segment_ids, in_order=True)
    spec = MaskSpec(q.shape[-1] ** -0.5 if scale is None else scale, causal, window, logit_cap)
    backends.check(backend, q, k, v, spec, in_order=True, also=("reference", "cudnn"))
    if sinks is not None and sinks.shape != (q.shape[2],):
        raise ValueError(
            f"flash_attention: sinks have shape {list(sinks.shape)}; there must be one for each "
            f"query head, [{q.shape[2]}]."
        )
    if backend == "reference":
        places = whole_rows(q.shape[1], segment_ids)
        return reference.attention(q, k, v, sinks, places, spec)
    if backend == "cudnn":
        if reason := cudnn.reason_against(q, segment_ids, sinks, spec):
            raise ValueError(f'flash_attention: {reason}; or set backend="xla".')
        return cudnn.attention(q, k, v, spec)
    return _attention(spec, backend, *align(q, k, v, sinks, segment_ids))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(
    spec: MaskSpec,
    backend: str | None,
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None,
    segments: Array | None,
) -> Array:
    return _forward(spec, backend, q, k, v, sinks, segments)[0]


def _forward(
    spec: MaskSpec,
    backend: str | None,
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None,
    segments: Array | None,
) -> tuple[Array, tuple]:
    places = whole_rows(q.shape[1], segments)
    out, lse = backends.forward(backend, q, k, v, sinks, places, spec, in_order=True)
    # Kept by a policy, both spare the backward pass a second forward pass.
    out, lse = checkpoint_name(out, CONTEXT), checkpoint_name(lse, CONTEXT)
    return out, (q, k, v, sinks, segments, out, lse)


def _backward(spec: MaskSpec, backend: str | None, residuals: tuple, grad: Array) -> tuple:
    q, k, v, sinks, segments, out, lse = residuals
    places = whole_rows(q.shape[1], segments)
    delta = backends.output_times_gradient(out, grad)
    grads = backends.backward(backend, q, k, v, lse, delta, grad, places, spec, in_order=True)
    of_sinks = None if sinks is None else backends.sinks_gradient(sinks, lse, delta)
    return *grads, of_sinks, None


_attention.defvjp(_forward, _backward)
