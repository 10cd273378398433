"""Sampling: every step by its definition in NumPy; the frequency of draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.inference import sampling
from moelib.inference.sampling import Sampling

B, V = 5, 40
LOGITS = np.random.default_rng(0).normal(0, 2, (B, V)).astype(np.float32)
LOGITS[1, :7] = LOGITS[1].max()  # As likely as each other.
LOGITS[2, 5:] = -np.inf  # Left out before.


def probabilities(row):
    exp = np.exp(row - row.max())
    return exp / exp.sum()


def kept_by_top_k(row, k):
    return row >= np.sort(row)[::-1][min(k, V) - 1]


def kept_by_top_p(row, p):
    probs = probabilities(row.astype(np.float64))
    order = np.argsort(-probs)
    number = 1 + np.sum(np.cumsum(probs[order])[:-1] < p)  # As few as reach p.
    return probs >= probs[order[number - 1]]


def kept_by_min_p(row, p):
    probs = probabilities(row)
    return probs >= p * probs.max()


@pytest.mark.parametrize(
    ("keep", "definition", "value"),
    [
        *((sampling.keep_top_k, kept_by_top_k, k) for k in (1, 2, 9, V, V + 3)),
        *((sampling.keep_top_p, kept_by_top_p, p) for p in (0.01, 0.5, 0.9, 0.999)),
        *((sampling.keep_min_p, kept_by_min_p, p) for p in (0.01, 0.3, 1.0)),
    ],
)
def test_filters_keep_the_tokens_of_their_definition(keep, definition, value):
    dtype = jnp.int32 if isinstance(value, int) else jnp.float32
    got = np.asarray(keep(jnp.asarray(LOGITS), dtype(value)))
    for row, out in zip(LOGITS, got, strict=True):
        kept = definition(row, value)
        np.testing.assert_array_equal(out, np.where(kept, row, -np.inf))


def test_all_probability_is_that_of_all_tokens():
    """Float32 probabilities of a few tokens may already have the sum 1."""
    logits = 6 * np.random.default_rng(0).normal(size=(2, 20000)).astype(np.float32)
    got = sampling.keep_top_p(jnp.asarray(logits), jnp.array([1.0, 0.5], jnp.float32))
    np.testing.assert_array_equal(got[0], logits[0])
    assert np.isfinite(got[1]).sum() < 20000


def test_seen_tokens_are_penalized_as_in_transformers():
    seen = np.random.default_rng(1).random((B, V)) < 0.5
    got = sampling.penalize_repetition(jnp.asarray(LOGITS), jnp.asarray(seen), jnp.float32(1.3))
    penalized = np.where(LOGITS < 0, LOGITS * np.float32(1.3), LOGITS / np.float32(1.3))
    np.testing.assert_allclose(got, np.where(seen, penalized, LOGITS), rtol=1e-6)


def chosen(row, settings, *, seen=None, num=2000):
    """Returns tokens selected from the logits of one sequence with keys 0, 1, ..."""
    keys = jax.vmap(jax.random.key)(jnp.arange(num, dtype=jnp.uint32))
    logits = jnp.broadcast_to(jnp.asarray(row), (num, V))
    if seen is not None:
        seen = jnp.broadcast_to(jnp.asarray(seen), (num, V))
    return np.asarray(jax.jit(sampling.sample)(logits, keys, seen, settings))


@pytest.mark.parametrize("row", [0, 2])
def test_tokens_are_drawn_in_proportion_to_their_probability(row):
    share = np.bincount(chosen(LOGITS[row], Sampling(temperature=jnp.float32(1.5))), minlength=V)
    want = probabilities(LOGITS[row] / 1.5)
    error = np.sqrt(want * (1 - want) / 2000)
    assert (np.abs(share / 2000 - want) <= 5 * error).all()


def test_each_step_filters_the_result_of_the_previous_one():
    seen = np.arange(V) < 20
    penalty, temperature, top_p, min_p = map(jnp.float32, (1.5, 2.0, 0.8, 0.2))
    steps = Sampling(penalty, temperature, jnp.int32(8), top_p, min_p)
    logits = np.where(LOGITS[0] < 0, LOGITS[0] * 1.5, LOGITS[0] / 1.5)
    logits = np.where(seen, logits, LOGITS[0]) / 2.0
    for keep, value in ((kept_by_top_k, 8), (kept_by_top_p, 0.8), (kept_by_min_p, 0.2)):
        logits = np.where(keep(logits, value), logits, -np.inf)
    assert 1 < np.isfinite(logits).sum() < 8
    assert set(chosen(LOGITS[0], steps, seen=seen)) == set(np.flatnonzero(np.isfinite(logits)))


def test_without_temperature_the_most_likely_token_is_selected():
    greedy = chosen(LOGITS[0], Sampling(), num=1)
    assert greedy == [LOGITS[0].argmax()]
    seen = np.arange(V) == LOGITS[0].argmax()
    penalized = chosen(LOGITS[0], Sampling(jnp.float32(1e6)), seen=seen, num=1)
    assert penalized == [np.argsort(LOGITS[0])[-2]]


def test_a_draw_depends_on_its_own_key_only():
    keys = jax.vmap(jax.random.key)(jnp.arange(B, dtype=jnp.uint32))
    draw, logits = jax.jit(sampling.draw), jnp.asarray(LOGITS)
    together = draw(logits, keys)
    alone = [draw(logits[i : i + 1], keys[i : i + 1])[0] for i in range(B)]
    np.testing.assert_array_equal(together, alone)
