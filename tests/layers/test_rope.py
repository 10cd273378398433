"""Rotary position embedding: complex rotation, and its consequences."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from moelib.layers.rope import (
    LinearRotaryEmbedding,
    Llama3RotaryEmbedding,
    RotaryEmbedding,
    YarnRotaryEmbedding,
    yarn_mscale,
)
from tests.layers.calling import build, call, normal

LAYER = build(RotaryEmbedding.default_config())
POSITIONS = np.array([[0, 1, 2, 1000], [7, 3, 0, 2047]])


def rotated(x, positions, theta, dim):
    """Returns x rotated by position * theta^(-2i/R); entries i, i + R/2 are a complex number."""
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
    # An angle of 2047 is precise to 2^-13 in float32.
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
    with pytest.raises(ValueError, match=f"layer: rotary_dim={dim}; .* head_dim=8"):
        call(layer, {}, jnp.zeros((2, 4, 3, 8)), jnp.asarray(POSITIONS))


def yarn(**settings):
    return build(
        YarnRotaryEmbedding.default_config(),
        **{"theta": 150_000.0, "factor": 32.0, "original_context": 4096, **settings},
    )


@pytest.mark.parametrize(
    ("settings", "dim", "ends"),
    [
        ({"truncate": False}, 64, (8.0928, 17.3980)),  # GPT-OSS.
        ({"theta": 10_000.0, "factor": 40.0}, 64, (10, 23)),  # DeepSeek-V2.
    ],
)
def test_yarn_slows_the_pairs_that_published_models_slow(settings, dim, ends):
    layer = yarn(**settings)
    np.testing.assert_allclose(layer.ramp_ends(dim), ends, atol=1e-4)
    plain = settings.get("theta", 150_000.0) ** (-np.arange(dim // 2) * 2 / dim)
    ratio = plain / np.asarray(layer.frequencies(dim), np.float64)[0]
    pairs = np.arange(dim // 2)
    np.testing.assert_allclose(ratio[pairs <= ends[0]], 1, rtol=1e-5)
    np.testing.assert_allclose(ratio[pairs >= ends[1]], settings.get("factor", 32.0), rtol=1e-5)
    assert (np.diff(ratio) >= -1e-4).all()


def test_yarn_makes_queries_and_keys_longer_by_its_factor():
    x = jnp.asarray(normal(2, 4, 3, 8))
    made = np.asarray(call(yarn(), {}, x, jnp.asarray(POSITIONS)))
    lengths = np.linalg.norm(made, axis=-1) / np.linalg.norm(x, axis=-1)
    np.testing.assert_allclose(lengths, 1.346574, rtol=1e-5)  # GPT-OSS: 0.1 ln 32 + 1.
    made = call(yarn(attention_factor=1.0), {}, x, jnp.asarray(POSITIONS))
    np.testing.assert_allclose(np.linalg.norm(made, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5)


def test_yarn_of_factor_one_is_the_plain_embedding():
    x = jnp.asarray(normal(2, 4, 3, 8))
    plain = build(RotaryEmbedding.default_config(), theta=150_000.0)
    got, want = (call(each, {}, x, jnp.asarray(POSITIONS)) for each in (yarn(factor=1.0), plain))
    np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("settings", [{"factor": 0.5}, {"beta_fast": 1.0}, {"beta_slow": 0.0}])
def test_yarn_refuses_invalid_settings(settings):
    with pytest.raises(ValueError, match=r"layer: (factor|beta_fast)="):
        yarn(**settings)


def test_deepseek_v2_lite_multiplies_scores_and_not_queries_and_keys():
    mscale = yarn_mscale(40.0, 0.707)
    np.testing.assert_allclose(mscale, 1.260804, atol=1e-6)
    np.testing.assert_allclose(192**-0.5 * mscale**2, 0.114721, atol=1e-6)
    layer = yarn(theta=10_000.0, factor=40.0, mscale=0.707, mscale_all_dim=0.707)
    x = jnp.asarray(normal(2, 4, 3, 64))
    made = np.asarray(call(layer, {}, x, jnp.asarray(POSITIONS)))
    np.testing.assert_allclose(np.linalg.norm(made, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5)


@pytest.mark.parametrize(("m", "m_all"), [(1.0, 0.0), (1.0, 0.707), (0.707, 1.0), (0.0, 0.0)])
def test_yarn_multiplies_by_one_mscale_over_the_other(m, m_all):
    x = jnp.asarray(normal(2, 4, 3, 8))
    made = np.asarray(call(yarn(mscale=m, mscale_all_dim=m_all), {}, x, jnp.asarray(POSITIONS)))
    lengths = np.linalg.norm(made, axis=-1) / np.linalg.norm(x, axis=-1)
    want = (0.1 * m * np.log(32) + 1) / (0.1 * m_all * np.log(32) + 1)
    np.testing.assert_allclose(lengths, want, rtol=1e-5)


@pytest.mark.parametrize("settings", [{"mscale": 0.707}, {"mscale_all_dim": 0.707}])
def test_yarn_refuses_two_words_on_one_factor(settings):
    with pytest.raises(ValueError, match=r"layer: attention_factor=1\.0"):
        yarn(attention_factor=1.0, **settings)


def test_mscale_of_a_shorter_context_is_refused():
    assert yarn_mscale(1.0) == 1.0
    with pytest.raises(ValueError, match=r"yarn_mscale: factor=0\.5"):
        yarn_mscale(0.5)


def test_linear_scaling_divides_positions():
    layer = build(LinearRotaryEmbedding.default_config(), factor=4.0)
    x = normal(2, 4, 3, 8)
    got = call(layer, {}, jnp.asarray(x), jnp.asarray(POSITIONS))
    np.testing.assert_allclose(got, rotated(x, POSITIONS / 4, 10_000.0, 8), atol=1e-3)
    with pytest.raises(ValueError, match=r"layer: factor=0\.5"):
        build(LinearRotaryEmbedding.default_config(), factor=0.5)


def llama3(**settings):
    cfg = Llama3RotaryEmbedding.default_config()
    return build(cfg, **{"theta": 500_000.0, "factor": 8.0, "original_context": 8192, **settings})


@pytest.mark.parametrize("settings", [{}, {"factor": 32.0}, {"low_freq_factor": 2.0}], ids=str)
def test_llama3_slows_pairs_by_their_wavelength(settings):
    layer = llama3(**settings)
    factor, low = settings.get("factor", 8.0), settings.get("low_freq_factor", 1.0)
    kinds, want = [], []
    for i in range(64):  # Wavelengths in tokens, as the published code has them.
        frequency = 500_000.0 ** (-i / 64)
        wavelength = 2 * np.pi / frequency
        if wavelength < 8192 / 4:
            kind, slowed = "kept", frequency
        elif wavelength > 8192 / low:
            kind, slowed = "slowed", frequency / factor
        else:
            smooth = (8192 / wavelength - low) / (4 - low)
            kind, slowed = "between", (1 - smooth) * frequency / factor + smooth * frequency
        kinds.append(kind)
        want.append(slowed)
    assert set(kinds) == {"kept", "between", "slowed"}
    np.testing.assert_allclose(layer.frequencies(128)[0], want, rtol=2e-5)
    x = normal(2, 4, 3, 128)
    got = np.asarray(call(layer, {}, jnp.asarray(x), jnp.asarray(POSITIONS)))
    np.testing.assert_allclose(np.linalg.norm(got, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5)


def test_llama3_of_factor_one_is_the_plain_embedding():
    plain = build(RotaryEmbedding.default_config(), theta=500_000.0)
    got = llama3(factor=1.0).frequencies(64)
    np.testing.assert_allclose(got, plain.frequencies(64), rtol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"factor": 0.5},
        {"factor": math.nan},
        {"original_context": 0},
        {"high_freq_factor": 1.0},
        {"theta": math.nan},
        {"theta": 0.0},
    ],
)
def test_llama3_refuses_invalid_settings(settings):
    ((name, value),) = settings.items()
    with pytest.raises(ValueError, match=f"layer: {name}={value}"):
        llama3(**settings)
