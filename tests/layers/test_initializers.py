"""Initializers: their moments, dtypes and independence of everything but key and spec."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core import tree
from moelib.core.param import FanAxes, ParameterSpec
from moelib.layers import initializers
from moelib.layers.attention.latent import LatentAttention
from moelib.layers.feed_forward import FeedForward
from moelib.layers.transformer import TransformerLayer
from tests import tiny
from tests.oracles.initial_scales import check_initial_scales

KEY = jax.random.key(0)
SPEC = ParameterSpec(
    (4, 64, 2, 128), ("experts", "embed", None, "ffn"), "float32", None, FanAxes((1,), (3,), (0, 2))
)


@pytest.mark.parametrize(
    ("init", "std"),
    [
        (initializers.normal(0.3), 0.3),
        (initializers.fan_in_normal(), 64**-0.5),
        (initializers.fan_in_normal(2.0), 2 * 64**-0.5),
        # The variance of a normal truncated at +-3: 1 - 6 phi(3) / (Phi(3) - Phi(-3)).
        (initializers.truncated_normal(0.3), 0.3 * 0.98658),
    ],
)
def test_draws_have_mean_zero_and_the_stated_spread(init, std):
    values = np.asarray(init(KEY, SPEC), np.float64)
    tolerance = 5 / np.sqrt(values.size)  # Five standard errors.
    assert abs(values.mean()) < std * tolerance
    assert abs(values.std() / std - 1) < tolerance


def test_weights_start_with_a_variance_of_one_over_their_number_of_terms():
    latent = LatentAttention.default_config().set(
        num_heads=6,
        q_lora_rank=52,
        kv_lora_rank=44,
        nope_head_dim=28,
        rope_head_dim=12,
        v_head_dim=20,
    )
    dense = FeedForward.default_config().set(hidden_dim=72)
    first = TransformerLayer.default_config().set(self_attention=latent, feed_forward=dense)
    layer = tiny.transformer_layer(tiny.plain_moe(hidden_dim=56, num_experts=8), head_dim=24)
    cfg = tiny.stacked(layer, num_layers=2, first_layers=[first]).set(name="stack", input_dim=40)
    values = tree.by_path(tiny.initial(cfg.instantiate(parent=None)))
    assert len(check_initial_scales(values)) == 11


def test_a_truncated_normal_stays_within_its_bound():
    values = initializers.truncated_normal(0.5, bound=2.0)(KEY, SPEC)
    assert 0.9 < float(jnp.max(jnp.abs(values))) <= 1.0


def test_constants_fill():
    np.testing.assert_array_equal(initializers.constant(1.5)(KEY, SPEC), np.full(SPEC.shape, 1.5))


@pytest.mark.parametrize("init", [initializers.normal(), initializers.constant(1.0)])
def test_values_are_of_the_dtype_of_the_spec(init):
    spec = ParameterSpec((8,), ("norm",), "bfloat16")
    assert init(KEY, spec).dtype == jnp.bfloat16


def test_fan_in_requires_fan_axes():
    with pytest.raises(ValueError, match=r"shape \(8,\).*fan_axes"):
        initializers.fan_in_normal()(KEY, ParameterSpec((8,), ("norm",), "float32"))
