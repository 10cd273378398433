"""The dense feed-forward layer against its formula."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from moelib.layers.activation import Activation
from moelib.layers.feed_forward import FeedForward
from tests.layers.calling import build, call, float64, initial, normal


def layer(activation):
    return build(FeedForward.default_config(), input_dim=4, hidden_dim=6, activation=activation)


def test_swiglu_is_silu_of_gate_times_up_projected_down():
    params = initial(layer(Activation.SWIGLU))
    x = normal(2, 3, 4)
    p = float64(params)
    gate, up = x.astype(np.float64) @ p["up"][0], x.astype(np.float64) @ p["up"][1]
    want = (gate / (1 + np.exp(-gate)) * up) @ p["down"]
    got = call(layer(Activation.SWIGLU), params, jnp.asarray(x))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_gelu_has_one_projection():
    params = initial(layer(Activation.GELU))
    assert params["up"].shape == (1, 4, 6)
    x = normal(2, 3, 4)
    p = float64(params)
    hidden = x.astype(np.float64) @ p["up"][0]
    hidden = 0.5 * hidden * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2)))
    got = call(layer(Activation.GELU), params, jnp.asarray(x))
    np.testing.assert_allclose(got, hidden @ p["down"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", Activation)
def test_flops_are_two_a_weight(activation):
    made = layer(activation)
    assert made.forward_flops_per_token(8) == 2 * made.active_parameters()


def test_the_mask_changes_nothing():
    made = layer(Activation.SWIGLU)
    params, x = initial(made), jnp.asarray(normal(2, 3, 4))
    masked = call(made, params, x, mask=jnp.zeros((2, 3), bool))
    np.testing.assert_array_equal(masked, call(made, params, x))
