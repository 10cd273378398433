"""What attention keeps of earlier tokens, and how one more token attends to it.

An array of a cache is [B, ..., L, n]: for each row L slots of n entries. Position p is in slot p.
Under a window of W tokens there are at most W slots, and p is in slot p mod W, in the place of
p - W. So which position a slot holds follows from the position of the newest token alone.

A prompt is stored whole: its tokens stand first in their row, at positions 0, 1, ..., and padding
after them. Later tokens are stored one by one. Whoever calls sees to it that there are slots
enough.

Letters: L slots, n entries of a slot.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moelib.kernels.flash_attention import MaskSpec


def num_slots(length: int, window: int | None) -> int:
    """Returns how many slots rows of at most `length` tokens need."""
    return length if window is None else min(length, window)


def held_positions(
    newest: Int[Array, "B"], slots: int, window: int | None = None
) -> Int[Array, "B L"]:
    """Returns the position that each slot holds once `newest` is stored; below 0 if it holds none.

    Args:
        newest: The newest position of each row, 0 or more, and below `slots` without a window.
        slots: L.
        window: W; None for all.
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
    """Returns the cache with new tokens in it, in its own dtype.

    Args:
        cache: What was kept so far; of no meaning if a prompt is stored.
        new: One token a row, or (S above 1) prompts.
        positions: Positions of the tokens.
        segment_ids: 0 for padding after a prompt; None if there is none.
        window: W; None for all.

    Raises:
        ValueError: If prompts are longer than a cache without a window.
    """
    new = new.astype(cache.dtype)
    slots, length = cache.shape[-2], new.shape[-2]
    if length == 1:
        slot = positions[:, 0] % (window or slots)
        put = lambda x, y, at: jax.lax.dynamic_update_slice_in_dim(x, y, at, axis=-2)
        # A value of its own, or XLA makes it twice, to be kept and to be used, each from a copy.
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
    """Returns the attention of each row's newest token to what is stored, in the dtype of v.

    The numbers are those of `attend` for the last token of the row; scores and softmax are float32.

    Args:
        q: Queries. Head h attends with key and value head h // (H / G).
        k: Keys, those of the newest token included.
        v: Values.
        positions: The position of the newest token.
        sinks: One more score for each head, which has no value.
        spec: Scale of the scores, window and cap.
    """
    batch, _, heads, dim = q.shape
    grouped = q.reshape(batch, k.shape[1], -1, dim)  # [B, G, H / G, Dh]
    scores = jnp.einsum("bgnd,bgld->bgnl", grouped, k, preferred_element_type=jnp.float32)
    scores = scores * spec.scale
    if spec.logit_cap is not None:
        scores = spec.logit_cap * jnp.tanh(scores / spec.logit_cap)
    held = held_positions(positions[:, 0], k.shape[2], spec.window)
    scores = jnp.where(held[:, None, None] >= 0, scores, -jnp.inf)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, k.shape[1], -1, 1)
        sink = jnp.broadcast_to(sink, (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, sink], axis=-1)
    probs = jax.nn.softmax(scores, axis=-1)[..., : k.shape[2]].astype(v.dtype)
    return jnp.einsum("bgnl,bgld->bgnd", probs, v).reshape(batch, 1, heads, v.shape[-1])
