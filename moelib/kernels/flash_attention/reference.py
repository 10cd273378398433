"""Reference of attention: scores in float32, of a block of queries and all keys at once.

Its memory is linear in the sequence, so that it can be compared with kernels at any length.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MASKED = -1e30  # Finite: a query that sees no key never becomes NaN.
EMPTY = MASKED / 10  # The logsumexp of no key at all: far above MASKED, far below any score.
_BLOCK = 64  # Queries.


class MaskSpec(NamedTuple):
    """Scale of the scores, and which of them count. Hashable: a static argument."""

    scale: float  # Multiplies the products of queries and keys.
    causal: bool = True  # A query sees itself and the tokens before it.
    window: int | None = None  # Number of tokens that a query sees, itself included; None: all.
    logit_cap: float | None = None  # Scores become cap * tanh(scores / cap).


class Positions(NamedTuple):
    """Positions of queries and keys in the sequence, and their segments."""

    q_index: Int[Array, "Q"]
    k_index: Int[Array, "K"]
    q_segments: Int[Array, "B Q"] | None = None
    k_segments: Int[Array, "B K"] | None = None


def whole_sequences(seq_len: int, segment_ids: Int[Array, "B S"] | None) -> Positions:
    """Returns the positions of whole sequences that attend to themselves."""
    index = jnp.arange(seq_len, dtype=jnp.int32)
    return Positions(index, index, segment_ids, segment_ids)


def attention_mask(positions: Positions, spec: MaskSpec) -> Bool[Array, "b Q K"]:
    """Returns whether each query may attend to each key, for b = B or 1."""
    ahead = positions.q_index[None, :, None] - positions.k_index[None, None, :]
    mask = ahead >= 0 if spec.causal else jnp.ones_like(ahead, bool)
    if spec.window is not None:
        mask = mask & (ahead < spec.window)
    if positions.q_segments is not None and positions.k_segments is not None:
        mask = mask & (positions.q_segments[:, :, None] == positions.k_segments[:, None, :])
    return mask


def capped(scores: Float[Array, "..."], spec: MaskSpec) -> Float[Array, "..."]:
    """Returns the scaled scores after the cap."""
    if spec.logit_cap is None:
        return scores
    return spec.logit_cap * jnp.tanh(scores / spec.logit_cap)


def attention(
    q: Float[Array, "B Q H Dh"],
    k: Float[Array, "B K G Dh"],
    v: Float[Array, "B K G Dv"],
    sinks: Float[Array, "H"] | None,
    positions: Positions,
    *,
    spec: MaskSpec,
) -> Float[Array, "B Q H Dv"]:
    """Returns softmax(masked scores) v, zeros for a query that sees no key.

    A sink is one more score of the softmax, with no value.
    """
    batch, num_keys, groups, dim = k.shape
    q_segments, k_segments = positions.q_segments, positions.k_segments

    @jax.checkpoint
    def of_query(operands: tuple[Array, Array, Array | None]) -> Float[Array, "B H Dv"]:
        q, index, segments = operands
        segments = None if segments is None else segments[:, None]
        grouped = q.reshape(batch, groups, -1, dim)
        scores = jnp.einsum("bgnd,bkgd->bgnk", grouped, k, preferred_element_type=jnp.float32)
        at = Positions(index[None], positions.k_index, segments, k_segments)
        mask = attention_mask(at, spec)[:, None]  # [b, 1, 1, K]
        scores = jnp.where(mask, capped(scores * spec.scale, spec), MASKED)
        if sinks is not None:
            column = sinks.astype(jnp.float32).reshape(1, groups, -1, 1)
            column = jnp.broadcast_to(column, (*scores.shape[:-1], 1))
            scores = jnp.concatenate([scores, column], axis=-1)
        probs = jax.nn.softmax(scores, axis=-1)[..., :num_keys]
        probs = jnp.where(mask, probs, 0).astype(v.dtype)
        return jnp.einsum("bgnk,bkgd->bgnd", probs, v).reshape(batch, q.shape[1], -1)

    segments = None if q_segments is None else q_segments.T
    queries = q.swapaxes(0, 1), positions.q_index, segments
    return jax.lax.map(of_query, queries, batch_size=_BLOCK).swapaxes(0, 1)
