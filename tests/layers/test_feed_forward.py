"""Linear and dense feed-forward layers, and activations, against their formulas."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from moelib.layers.activation import Activation
from moelib.layers.feed_forward import FeedForward
from moelib.layers.linear import Linear
from tests.layers.calling import build, call, float64, initial, normal
from tests.oracles.moe import sigmoid


def layer(activation):
    return build(FeedForward.default_config(), input_dim=4, hidden_dim=6, activation=activation)


@pytest.mark.parametrize("activation", [Activation.SWIGLU, Activation.GELU])
def test_the_activation_of_one_or_two_projections_is_projected_down_whatever_the_mask(activation):
    made = layer(activation)
    params, x = initial(made), normal(2, 3, 4)
    p = float64(params)
    parts = np.einsum("bsd,ndf->nbsf", x.astype(np.float64), p["up"])
    got = call(made, params, x, mask=np.zeros((2, 3), bool))
    np.testing.assert_allclose(got, WANT[activation](*parts) @ p["down"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", Activation)
def test_flops_are_two_a_weight(activation):
    made = layer(activation)
    assert made.forward_flops_per_token(8) == 2 * made.active_parameters()


def silu(x):
    return x * sigmoid(x)


def gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def clamped(gate, up):
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return (up + 1) * gate * sigmoid(1.702 * gate)


WANT = {
    Activation.GELU: gelu,
    Activation.SILU: silu,
    Activation.RELU: lambda x: np.maximum(x, 0),
    Activation.SQUARED_RELU: lambda x: np.maximum(x, 0) ** 2,
    Activation.SWIGLU: lambda gate, up: silu(gate) * up,
    Activation.GEGLU: lambda gate, up: gelu(gate) * up,
    Activation.CLAMPED_SWIGLU: clamped,
}


@pytest.mark.parametrize("activation", Activation)
def test_it_is_its_formula(activation):
    parts = normal(activation.num_projections, 3, 50, scale=6)
    want = WANT[activation](*parts.astype(np.float64))
    got = activation.function(*jnp.asarray(parts))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_the_function_is_the_same_object_each_time():  # Another object would be compiled again.
    for activation in Activation:
        assert activation.function is activation.function


@pytest.mark.parametrize(("shape", "bias"), [((3,), False), ((2, 3), True), ((2, 5, 3), True)])
def test_the_last_dimension_is_mapped(shape, bias):
    layer = build(Linear.default_config(), input_dim=3, output_dim=4, bias=bias)
    params = initial(layer)
    assert layer.forward_flops_per_token(8) == 2 * 3 * 4
    if bias:
        params["bias"] = jnp.asarray(normal(4, seed=1))
    x, want = normal(*shape), float64(params)
    want = x.astype(np.float64) @ want["weight"] + want.get("bias", 0.0)
    np.testing.assert_allclose(call(layer, params, jnp.asarray(x)), want, rtol=1e-5, atol=1e-6)


def test_a_bias_starts_at_zero_is_not_decayed_and_split_as_the_outputs():
    layer = build(
        Linear.default_config(), input_dim=3, output_dim=4, bias=True, axes=("embed", "vocab")
    )
    spec = layer.layer_parameter_specs()["bias"]
    assert spec.weight_decay_scale == 0
    assert spec.axes == ("vocab",)
    assert not np.any(initial(layer)["bias"])
