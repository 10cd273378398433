"""Activations against their formulas."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from moelib.layers.activation import Activation
from tests.layers.calling import normal
from tests.oracles.moe import sigmoid


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
