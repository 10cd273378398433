"""The KV cache of attention, and the attention of one new token to it.

An array of a cache is [B, ..., L, n]: L slots of n entries per sequence. Position p is in slot p.
Under a window of W tokens there are at most W slots, and p overwrites p - W in slot p mod W. So the
position of the newest token determines the positions in all slots.

Prompts are stored whole: their tokens at positions 0, 1, ..., then padding. Later tokens are stored
one by one. The caller provides enough slots.

Letters: L slots, n entries of a slot.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moelib.kernels.flash_attention import MaskSpec, capped


def num_slots(length: int, window: int | None) -> int:
    """Returns the number of slots for sequences of at most `length` tokens."""
    return length if window is None else min(length, window)


def held_positions(
    newest: Int[Array, "B"], slots: int, window: int | None = None
) -> Int[Array, "B L"]:
    """Returns the position in each slot after `newest` is stored; below 0 for an empty slot.

    Without a window, the newest position of a sequence is below the number of slots.
    """
    behind = newest[:, None] - jnp.arange(slots, dtype=newest.dtype)[None]
    return newest[:, None] - behind % (window or slots)


def store(
    cache: Float[Array, "B *n L e"],
    new: Float[Array, "B *n S e"],
    positions: Int[Array, "B S"],
    segment_ids: Int[Array, "B S"] | None = None,
    window: int | None = None,
) -> Float[Array, "B *n L e"]:
    """Returns the cache with new tokens stored, in its own dtype.

    The tokens are one per sequence (S = 1), or prompts (S above 1), which replace all slots.
    Segment ids are 0 for padding after a prompt; None stands for no padding.

    Raises:
        ValueError: If prompts are longer than a cache without a window.
    """
    new = new.astype(cache.dtype)
    slots, length = cache.shape[-2], new.shape[-2]
    if length == 1:
        slot = positions[:, 0] % (window or slots)
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=-2)
        # The barrier keeps XLA from computing the update twice, once for each of its two uses.
        return jax.lax.optimization_barrier(jax.vmap(put)(cache, new, slot))
    if length > slots:
        if window is None or slots < window:
            raise ValueError(
                f"A cache of {slots} slots is too short for prompts of {length} tokens; make one "
                "of their length or more."
            )
        newest = positions[:, -1] if segment_ids is None else jnp.sum(segment_ids > 0, 1) - 1
        held = jnp.maximum(held_positions(newest, slots, window), 0)
        index = held.reshape(len(held), *(1,) * (new.ndim - 3), slots, 1)
        new = jnp.take_along_axis(new, index, axis=-2)
    return jax.lax.dynamic_update_slice_in_dim(cache, new, 0, axis=-2)


def attend_to_cache(
    q: Float[Array, "B 1 H Dh"],
    k: Float[Array, "B G L Dh"],
    v: Float[Array, "B G L Dv"],
    positions: Int[Array, "B 1"],
    sinks: Float[Array, "H"] | None,
    spec: MaskSpec,
) -> Float[Array, "B 1 H Dv"]:
    """Returns the attention of each sequence's newest token to the cache, in the dtype of v.

    It equals `attend` for the last token of the sequence. Scores and softmax are float32.
    Keys and values include those of the newest token, whose position is given.
    """
    batch, _, heads, dim = q.shape
    grouped = q.reshape(batch, k.shape[1], -1, dim)  # [B, G, H / G, Dh]
    scores = jnp.einsum("bgnd,bgld->bgnl", grouped, k, preferred_element_type=jnp.float32)
    scores = capped(scores * spec.scale, spec)
    held = held_positions(positions[:, 0], k.shape[2], spec.window)
    scores = jnp.where(held[:, None, None] >= 0, scores, -jnp.inf)
    if sinks is not None:
        sink = sinks.reshape(1, k.shape[1], -1, 1)
        sink = jnp.broadcast_to(sink, (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, sink], axis=-1)
    probs = jax.nn.softmax(scores, axis=-1)[..., : k.shape[2]].astype(v.dtype)
    return jnp.einsum("bgnl,bgld->bgnd", probs, v).reshape(batch, 1, heads, v.shape[-1])
