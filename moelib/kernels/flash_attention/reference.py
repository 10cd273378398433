"""What attention means, at any cost: all scores at once, in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

MASKED = -1e30  # Finite: a row with nothing to attend to never becomes NaN.


def attention_mask(
    q_index: Int[Array, "Q"],
    k_index: Int[Array, "K"],
    q_segments: Int[Array, "B Q"] | None,
    k_segments: Int[Array, "B K"] | None,
    *,
    causal: bool,
) -> Array:
    """Returns [B or 1, Q, K], true where the query at q_index may attend to the key at k_index."""
    mask = jnp.ones((1, q_index.shape[0], k_index.shape[0]), bool)
    if causal:
        mask = mask & (q_index[None, :, None] >= k_index[None, None, :])
    if q_segments is not None and k_segments is not None:
        mask = mask & (q_segments[:, :, None] == k_segments[:, None, :])
    return mask


def attend(
    q: Float[Array, "B Q H Dh"],
    k: Float[Array, "B K G Dh"],
    v: Float[Array, "B K G Dh"],
    mask: Array,
    *,
    scale: float,
) -> Float[Array, "B Q H Dh"]:
    """Returns softmax(scale q k^T, where mask) v; zeros where all is masked. In float32 inside."""
    batch, queries, heads, dim = q.shape
    grouped = q.reshape(batch, queries, k.shape[2], heads // k.shape[2], dim)
    scores = jnp.einsum("bqgnd,bkgd->bgnqk", grouped, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None, None], scores * scale, MASKED)
    probs = jnp.where(mask[:, None, None], jax.nn.softmax(scores, axis=-1), 0.0).astype(v.dtype)
    out = jnp.einsum("bgnqk,bkgd->bqgnd", probs, v)
    return out.reshape(q.shape)


def attention(
    q: Float[Array, "B S H Dh"],
    k: Float[Array, "B S G Dh"],
    v: Float[Array, "B S G Dh"],
    segment_ids: Int[Array, "B S"] | None = None,
    *,
    causal: bool = True,
    scale: float,
) -> Float[Array, "B S H Dh"]:
    """Returns attention over whole sequences."""
    index = jnp.arange(q.shape[1])
    mask = attention_mask(index, index, segment_ids, segment_ids, causal=causal)
    return attend(q, k, v, mask, scale=scale)
