"""Rotary position embedding: complex rotation, and its consequences."""

import numpy as np
import pytest

from moelib.core.errors import UserError
from moelib.layers.rope import (
    LinearRotaryEmbedding,
    Llama3RotaryEmbedding,
    RotaryEmbedding,
    YarnRotaryEmbedding,
    yarn_mscale,
)
from tests.layers.calling import build, call, normal
from tests.oracles import rope
from tests.oracles.rope import rotated

X = normal(2, 4, 3, 8)
POSITIONS = np.array([[0, 1, 2, 1000], [7, 3, 0, 2047]])


@pytest.mark.parametrize(("theta", "dim"), [(10_000.0, None), (10_000.0, 4), (500.0, 8)])
@pytest.mark.parametrize("positions", [POSITIONS, np.minimum(POSITIONS, 9)])
def test_pairs_turn_by_position_times_frequency(theta, dim, positions):
    layer = build(RotaryEmbedding.default_config(), theta=theta, rotary_dim=dim)
    turned = rotated(X[..., :dim].astype(np.float64), positions[..., None], theta)
    want = np.concatenate([turned, X[..., dim or 8 :]], -1)
    # An angle of 2047 is precise to 2^-13 in float32.
    atol = 2e-3 if positions is POSITIONS else 1e-5
    np.testing.assert_allclose(call(layer, {}, X, positions), want, atol=atol)


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
    want = rope.yarn(dim, layer.config.theta, layer.config.factor, layer.ramp_ends(dim))
    np.testing.assert_allclose(layer.frequencies(dim)[0], want, rtol=1e-5)


DEEPSEEK = {"theta": 10_000.0, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707}


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({}, 1.346574),  # GPT-OSS: 0.1 ln 32 + 1.
        ({"attention_factor": 1.0}, 1),
        (DEEPSEEK, 1),  # DeepSeek-V2-Lite multiplies scores.
        ({"mscale": 1.0, "mscale_all_dim": 0.707}, 1.346574 / (0.0707 * np.log(32) + 1)),
        ({"mscale": 0.707, "mscale_all_dim": 1.0}, (0.0707 * np.log(32) + 1) / 1.346574),
        ({"mscale": 0.0, "mscale_all_dim": 0.0}, 1),
    ],
    ids=str,
)
def test_yarn_multiplies_queries_and_keys_by_its_factor(settings, scale):
    lengths = [np.linalg.norm(x, axis=-1) for x in (call(yarn(**settings), {}, X, POSITIONS), X)]
    np.testing.assert_allclose(lengths[0] / lengths[1], scale, rtol=1e-5)


def test_the_factor_of_scores_is_that_of_deepseek_v2_lite():
    mscale = yarn_mscale(40.0, 0.707)
    np.testing.assert_allclose(mscale, 1.260804, atol=1e-6)
    np.testing.assert_allclose(192**-0.5 * mscale**2, 0.114721, atol=1e-6)
    assert yarn_mscale(1.0) == 1.0


def linear(**settings):
    return build(LinearRotaryEmbedding.default_config(), **settings)


def test_linear_scaling_divides_positions():
    layer = linear(factor=4.0)
    want = rotated(X.astype(np.float64), POSITIONS[..., None] / 4)
    np.testing.assert_allclose(call(layer, {}, X, POSITIONS), want, atol=1e-3)


def llama3(**settings):
    cfg = Llama3RotaryEmbedding.default_config()
    return build(cfg, **{"theta": 500_000.0, "factor": 8.0, "original_context": 8192, **settings})


@pytest.mark.parametrize("settings", [{}, {"factor": 32.0}, {"low_freq_factor": 2.0}], ids=str)
def test_llama3_slows_pairs_by_their_wavelength(settings):
    layer = llama3(**settings)
    sizes = {"factor": 8.0, "original_context": 8192, **settings}
    want = rope.llama3(128, 500_000.0, **sizes)
    slower = 500_000.0 ** (-np.arange(64) / 64) / want  # Pairs kept, in between and slowed.
    assert (slower.min(), slower.max()) == pytest.approx((1, sizes["factor"]))
    assert ((slower > 1.01) & (slower < 0.99 * sizes["factor"])).any()
    np.testing.assert_allclose(layer.frequencies(128)[0], want, rtol=2e-5)
    x = normal(2, 4, 3, 128)
    got = call(layer, {}, x, POSITIONS)
    np.testing.assert_allclose(np.linalg.norm(got, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5)


def test_yarn_refuses_frequencies_that_are_all_equal():
    with pytest.raises(UserError, match=r"theta=1\.0"):
        build(YarnRotaryEmbedding.default_config(), theta=1.0, factor=2.0, original_context=8)
