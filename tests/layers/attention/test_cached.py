"""The KV cache: positions in its slots, and attention to it against that to whole sequences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.kernels.flash_attention import MaskSpec, flash_attention
from moelib.layers.attention import cached
from moelib.layers.attention.cached import held_positions, num_slots
from tests.layers.calling import normal

store = jax.jit(cached.store, static_argnums=4)  # One program per call.
attend_to_cache = jax.jit(cached.attend_to_cache, static_argnames="spec")

B, S = 3, 11
LENGTHS = (1, 11, 6)  # Tokens of each prompt.


def held_by_hand(length, slots, window):
    """Returns the position in each slot after 0 to length - 1 were stored one by one."""
    held = [-1] * slots
    for position in range(length):
        held[position % window if window else position] = position
    return held


def stored_by_hand(rows, lengths, slots, window):
    """Returns rows [B, S, n] in their slots, zeros where there is none."""
    cache = np.zeros((len(rows), slots, rows.shape[-1]), np.float32)
    for row, length in enumerate(lengths):
        for slot, position in enumerate(held_by_hand(length, slots, window)):
            if position >= 0:
                cache[row, slot] = rows[row, position]
    return cache


def is_held(lengths, slots, window):
    newest = jnp.asarray(lengths, jnp.int32) - 1
    return np.asarray(held_positions(newest, slots, window)) >= 0


@pytest.mark.parametrize(("slots", "window"), [(16, None), (4, 4), (1, 1), (3, 8)])
def test_slots_hold_the_newest_positions(slots, window):
    for length in range(1, (slots if window in (None, 8) else 12) + 1):
        held = held_positions(jnp.asarray([length - 1]), slots, window)[0]
        np.testing.assert_array_equal(np.maximum(held, -1), held_by_hand(length, slots, window))


def test_a_window_needs_no_more_slots_than_it_has_tokens():
    assert [num_slots(n, w) for n, w in ((64, None), (64, 8), (4, 8))] == [64, 8, 4]


@pytest.mark.parametrize(
    ("slots", "window", "heads"),
    [(16, None, ()), (11, None, (2,)), (4, 4, ()), (4, 4, (2,)), (16, 20, ())],
)
def test_prompts_and_single_tokens_are_stored_where_they_belong(slots, window, heads):
    rows = normal(B, *heads, S + 1, 5)
    prompts, more = rows[..., :S, :], np.array(LENGTHS)
    index = np.broadcast_to(np.arange(S), (B, S))
    segments = jnp.asarray(index < more[:, None], jnp.int32)
    empty = jnp.zeros((B, *heads, slots, 5))
    positions = jnp.asarray(index, jnp.int32)
    cache = store(empty, jnp.asarray(prompts), positions, segments, window)
    by_head = lambda x: np.asarray(x) if not heads else np.asarray(x)[:, 1]
    held = is_held(LENGTHS, slots, window)[..., None]
    want = stored_by_hand(by_head(rows), LENGTHS, slots, window)
    np.testing.assert_array_equal(np.where(held, by_head(cache), 0), want)

    if slots == 11:
        return  # No free slot is left.
    one = np.take_along_axis(rows, more.reshape(B, *(1 for _ in heads), 1, 1), axis=-2)
    cache = store(cache, jnp.asarray(one), jnp.asarray(more[:, None], jnp.int32), None, window)
    held = is_held(more + 1, slots, window)[..., None]
    want = stored_by_hand(by_head(rows), more + 1, slots, window)
    np.testing.assert_array_equal(np.where(held, by_head(cache), 0), want)


def test_prompts_without_padding_fill_a_ring_to_their_end():
    rows, positions = normal(1, S, 5), jnp.arange(S, dtype=jnp.int32)[None]
    got = store(jnp.zeros((1, 4, 5)), jnp.asarray(rows), positions, None, 4)
    np.testing.assert_array_equal(got, stored_by_hand(rows, [S], 4, 4))


@pytest.mark.parametrize("window", [None, 6])
def test_prompts_longer_than_the_cache_are_refused(window):
    positions = jnp.arange(S, dtype=jnp.int32)[None]
    with pytest.raises(ValueError, match=r"4 slots.*11"):
        store(jnp.zeros((1, 4, 5)), jnp.zeros((1, S, 5)), positions, None, window)


@pytest.mark.parametrize(
    ("groups", "spec", "with_sinks"),
    [
        (1, MaskSpec(0.4), False),
        (2, MaskSpec(0.4, window=4), True),
        (4, MaskSpec(0.9, logit_cap=0.7), False),
    ],
)
def test_the_newest_token_attends_as_the_last_of_a_whole_sequence(groups, spec, with_sinks):
    q, k, v = (normal(B, S, n, 8, seed=i) for i, n in enumerate((4, groups, groups)))
    sinks = jnp.asarray(normal(4, seed=5)) if with_sinks else None
    arrays = map(jnp.asarray, (q, k, v))
    attend = functools.partial(flash_attention, spec=spec, backend="reference")
    whole = jax.jit(attend)(*arrays, sinks=sinks)
    slots = num_slots(16, spec.window)
    last = np.array(LENGTHS) - 1
    garbage = normal(B, groups, slots, 8, seed=9, scale=100.0)  # In empty slots.
    held = is_held(LENGTHS, slots, spec.window)[:, None, :, None]
    caches = []
    for x in (k, v):
        stored = [stored_by_hand(x[:, :, g], LENGTHS, slots, spec.window) for g in range(groups)]
        caches.append(jnp.asarray(np.where(held, np.stack(stored, axis=1), garbage)))
    newest = jnp.asarray(q[np.arange(B), last][:, None])
    positions = jnp.asarray(last[:, None], jnp.int32)
    got = attend_to_cache(newest, caches[0], caches[1], positions, sinks, spec)
    np.testing.assert_allclose(got[:, 0], whole[np.arange(B), last], atol=2e-6)
