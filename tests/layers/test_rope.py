"""Rotary position embedding: complex rotation, and what follows from it."""

import jax.numpy as jnp
import numpy as np
import pytest

from moelib.layers.rope import RotaryEmbedding
from tests.layers.calling import build, call, normal

LAYER = build(RotaryEmbedding.default_config())
POSITIONS = np.array([[0, 1, 2, 1000], [7, 3, 0, 2047]])


def rotated(x, positions, theta, dim):
    """Entry i and i + R/2 are one complex number, turned by position * theta^(-2i/R)."""
    x = x.astype(np.float64)
    pairs = x[..., : dim // 2] + 1j * x[..., dim // 2 : dim]
    frequency = theta ** (-2 * np.arange(dim // 2) / dim)
    pairs = pairs * np.exp(1j * positions[:, :, None, None] * frequency)
    return np.concatenate([pairs.real, pairs.imag, x[..., dim:]], -1)


@pytest.mark.parametrize(("theta", "dim"), [(10_000.0, None), (10_000.0, 4), (500.0, 8)])
def test_pairs_turn_by_position_times_frequency(theta, dim):
    layer = build(RotaryEmbedding.default_config(), theta=theta, rotary_dim=dim)
    x = normal(2, 4, 3, 8)
    got = call(layer, {}, jnp.asarray(x), jnp.asarray(POSITIONS))
    # An angle of 2047 has 2^-13 of float32's precision left.
    np.testing.assert_allclose(got, rotated(x, POSITIONS, theta, dim or 8), atol=2e-3)
    near = np.minimum(POSITIONS, 9)
    got = call(layer, {}, jnp.asarray(x), jnp.asarray(near))
    np.testing.assert_allclose(got, rotated(x, near, theta, dim or 8), atol=1e-5)


def test_scores_depend_on_the_distance_only():
    q, k = (jnp.asarray(normal(1, 6, 1, 8, seed=s)) for s in (1, 2))
    same_q, same_k = (jnp.broadcast_to(x[:, :1], x.shape) for x in (q, k))
    at = lambda shift: jnp.arange(6)[None] + shift
    near = jnp.einsum(
        "bshd,bthd->st", call(LAYER, {}, same_q, at(0)), call(LAYER, {}, same_k, at(0))
    )
    far = jnp.einsum(
        "bshd,bthd->st", call(LAYER, {}, same_q, at(50)), call(LAYER, {}, same_k, at(50))
    )
    np.testing.assert_allclose(near, far, atol=1e-4)
    np.testing.assert_allclose(near[1:, 1:], near[:-1, :-1], atol=1e-4)


def test_lengths_stay():
    x = normal(2, 4, 3, 8)
    got = np.asarray(call(LAYER, {}, jnp.asarray(x), jnp.asarray(POSITIONS)))
    np.testing.assert_allclose(np.linalg.norm(got, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5)


@pytest.mark.parametrize("dim", [3, 10])
def test_a_rotary_dim_that_does_not_fit_is_refused(dim):
    layer = build(RotaryEmbedding.default_config(), rotary_dim=dim)
    with pytest.raises(ValueError, match=f"layer: rotary_dim is {dim}; .* at most the head's 8"):
        call(layer, {}, jnp.zeros((2, 4, 3, 8)), jnp.asarray(POSITIONS))
