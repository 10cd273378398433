"""What attention means, at any cost: all scores at once, in float32."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moelib.kernels.flash_attention.finite import poison_scores

MASKED = -1e30  # Finite: a row with nothing to attend to never becomes NaN.
EMPTY = MASKED / 10  # The logsumexp of no key at all: far above MASKED, far below any score.


class MaskSpec(NamedTuple):
    """How scores are made, and which of them count. Hashable: a static argument."""

    scale: float  # Multiplies the products of queries and keys.
    causal: bool = True  # A query sees itself and what stands before it.
    window: int | None = None  # Of these, itself and the window - 1 before it.
    logit_cap: float | None = None  # Scores become cap * tanh(scores / cap).


class Places(NamedTuple):
    """Where queries and keys stand: their positions in the row, and their segments."""

    q_index: Int[Array, "Q"]
    k_index: Int[Array, "K"]
    q_segments: Int[Array, "B Q"] | None = None
    k_segments: Int[Array, "B K"] | None = None


def whole_rows(seq_len: int, segment_ids: Int[Array, "B S"] | None) -> Places:
    """Returns the places of whole sequences that attend to themselves."""
    index = jnp.arange(seq_len, dtype=jnp.int32)
    return Places(index, index, segment_ids, segment_ids)


def attention_mask(places: Places, spec: MaskSpec) -> Bool[Array, "b Q K"]:
    """Returns, for b = B or 1, where a query may attend to a key."""
    ahead = places.q_index[None, :, None] - places.k_index[None, None, :]
    mask = ahead >= 0 if spec.causal else jnp.ones_like(ahead, bool)
    if spec.window is not None:
        mask = mask & (ahead < spec.window)
    if places.q_segments is not None and places.k_segments is not None:
        mask = mask & (places.q_segments[:, :, None] == places.k_segments[:, None, :])
    return mask


def capped(scores: Float[Array, "..."], spec: MaskSpec) -> Float[Array, "..."]:
    """Returns the scores, scaled already, after the spec's cap."""
    if spec.logit_cap is None:
        return scores
    return spec.logit_cap * jnp.tanh(scores / spec.logit_cap)


def attention(
    q: Float[Array, "B Q H Dh"],
    k: Float[Array, "B K G Dh"],
    v: Float[Array, "B K G Dh"],
    sinks: Float[Array, "H"] | None,
    places: Places,
    spec: MaskSpec,
) -> Float[Array, "B Q H Dh"]:
    """Returns softmax(scores, where the mask) v, zeros where all is masked.

    A sink is one more score of the softmax, with no value.
    """
    batch, queries, heads, dim = q.shape
    groups = k.shape[2]
    q, k, v = poison_scores(q, k, v)
    grouped = q.reshape(batch, queries, groups, heads // groups, dim)
    scores = jnp.einsum("bqgnd,bkgd->bgnqk", grouped, k, preferred_element_type=jnp.float32)
    mask = attention_mask(places, spec)[:, None, None]
    scores = jnp.where(mask, capped(scores * spec.scale, spec), MASKED)
    if sinks is not None:
        column = sinks.astype(jnp.float32).reshape(1, groups, -1, 1, 1)
        column = jnp.broadcast_to(column, (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, column], axis=-1)
    probs = jax.nn.softmax(scores, axis=-1)[..., : k.shape[1]]
    probs = jnp.where(mask, probs, 0.0).astype(v.dtype)
    out = jnp.einsum("bgnqk,bkgd->bqgnd", probs, v)
    return out.reshape(q.shape)
