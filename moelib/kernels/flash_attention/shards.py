"""Attention of one shard of queries to one shard of keys: what ring attention is made of.

Each device holds a shard of a row's queries and meets the shards of keys one after the other:

    part = attention_forward(q, k, v, q_index, k_index)         # For the first shard of keys;
    part = merge(part, attention_forward(q, k, v, q_index, k_index))  # for every other one.
    out, lse = add_sinks(part, sinks)
    ...
    grads = attention_backward(q, k, v, out, lse, grad, q_index, k_index)  # For every shard.

The gradients of a shard are sums over the shards that it met: q's stay where they are, those of k
and v travel with them. Positions may come in any order, so a row can be split in zigzag. All
results are in float32, to be summed.

Source: Liu et al., Ring Attention, arXiv:2310.01889.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from moelib.kernels.flash_attention import backends
from moelib.kernels.flash_attention.reference import MaskSpec, Places

Part = tuple[Float32[Array, "B Q H Dh"], Float32[Array, "B H Q"]]  # Output and logsumexp.


def attention_forward(
    q: Float[Array, "B Q H Dh"],
    k: Float[Array, "B K G Dh"],
    v: Float[Array, "B K G Dh"],
    q_index: Int[Array, "Q"],
    k_index: Int[Array, "K"],
    q_segments: Int[Array, "B Q"] | None = None,
    k_segments: Int[Array, "B K"] | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    logit_cap: float | None = None,
    scale: float | None = None,
    backend: str | None = None,
) -> Part:
    """Returns the attention of these queries to these keys alone, and the logsumexp of the scores.

    A query that sees none of the keys gives zeros, and a logsumexp that no `merge` notices.

    Args:
        q: Queries. Head h attends with key and value head h // (H / G).
        k: Keys.
        v: Values.
        q_index: The queries' positions in the row.
        k_index: The keys' positions in the row.
        q_segments: The queries' segments, or None.
        k_segments: The keys' segments, or None.
        causal: As for `flash_attention`.
        window: As for `flash_attention`.
        logit_cap: As for `flash_attention`.
        scale: As for `flash_attention`.
        backend: As for `flash_attention`.

    Raises:
        ValueError: As for `flash_attention`; and if only one side has segments.
    """
    places = Places(q_index, k_index, q_segments, k_segments)
    _check(q, k, v, places)
    spec = MaskSpec(q.shape[-1] ** -0.5 if scale is None else scale, causal, window, logit_cap)
    backends.check(backend, q, k, v, spec, in_order=False)
    return backends.forward(backend, q, k, v, None, places, spec, in_order=False)


def merge(a: Part, b: Part) -> Part:
    """Returns the attention of the same queries to the keys of both parts, which share none."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    lse = jnp.logaddexp(lse_a, lse_b)
    return out_a * _weight(lse_a - lse) + out_b * _weight(lse_b - lse), lse


def add_sinks(part: Part, sinks: Float[Array, "H"]) -> Part:
    """Returns the part with one more score a head in its softmax, which has no value.

    To be called once, after all keys.
    """
    out, lse = part
    total = jnp.logaddexp(lse, sinks.astype(lse.dtype)[None, :, None])
    return out * _weight(lse - total), total


def attention_backward(
    q: Float[Array, "B Q H Dh"],
    k: Float[Array, "B K G Dh"],
    v: Float[Array, "B K G Dh"],
    out: Float[Array, "B Q H Dh"],
    lse: Float32[Array, "B H Q"],
    grad: Float[Array, "B Q H Dh"],
    q_index: Int[Array, "Q"],
    k_index: Int[Array, "K"],
    q_segments: Int[Array, "B Q"] | None = None,
    k_segments: Int[Array, "B K"] | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    logit_cap: float | None = None,
    scale: float | None = None,
    backend: str | None = None,
) -> tuple[Float32[Array, "B Q H Dh"], Float32[Array, "B K G Dh"], Float32[Array, "B K G Dh"]]:
    """Returns what these queries and these keys add to the gradients in q, k and v.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        out: The whole attention of the queries, to the keys of all shards, sinks included.
        lse: Its logsumexp.
        grad: The gradient of `out`.
        q_index: As for `attention_forward`, as is all that follows.
        k_index: The keys' positions.
        q_segments: The queries' segments.
        k_segments: The keys' segments.
        causal: As for `flash_attention`.
        window: As for `flash_attention`.
        logit_cap: As for `flash_attention`.
        scale: As for `flash_attention`.
        backend: As for `flash_attention`.

    Raises:
        ValueError: As for `attention_forward`.
    """
    places = Places(q_index, k_index, q_segments, k_segments)
    _check(q, k, v, places)
    spec = MaskSpec(q.shape[-1] ** -0.5 if scale is None else scale, causal, window, logit_cap)
    backends.check(backend, q, k, v, spec, in_order=False)
    grad, delta = grad.astype(q.dtype), backends.output_times_gradient(out, grad)
    return backends.backward(backend, q, k, v, lse, delta, grad, places, spec, in_order=False)


def sinks_gradient(
    sinks: Float[Array, "H"],
    out: Float[Array, "B Q H Dh"],
    lse: Float32[Array, "B H Q"],
    grad: Float[Array, "B Q H Dh"],
) -> Float[Array, "H"]:
    """Returns what these queries add to the sinks' gradient; arguments as for the backward pass."""
    return backends.sinks_gradient(sinks, lse, backends.output_times_gradient(out, grad))


def _weight(log: Float32[Array, "B H Q"]) -> Float32[Array, "B Q H 1"]:
    return jnp.exp(log).transpose(0, 2, 1)[..., None]


def _check(q: Array, k: Array, v: Array, places: Places) -> None:
    if (places.q_segments is None) != (places.k_segments is None):
        with_segments = "keys" if places.q_segments is None else "queries"
        raise ValueError(
            f"flash_attention: only the {with_segments} have segments; give both their segments, "
            "or neither."
        )
    backends.check_shapes(q, k, v, places.q_segments, places.k_segments, in_order=False)
    lengths = q.shape[1], k.shape[1]
    if (places.q_index.shape, places.k_index.shape) != ((lengths[0],), (lengths[1],)):
        raise ValueError(
            f"flash_attention: q_index {places.q_index.shape} and k_index {places.k_index.shape} "
            f"must have a position for each of {lengths[0]} queries and {lengths[1]} keys."
        )
