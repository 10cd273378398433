"""Activations against their formulas."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from moelib.layers.activation import Activation, activate
from tests.layers.calling import normal


def silu(x):
    return x / (1 + np.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


PLAIN = {Activation.GELU: gelu, Activation.SILU: silu, Activation.RELU: lambda x: np.maximum(x, 0)}
GATED = {Activation.SWIGLU: silu, Activation.GEGLU: gelu}


@pytest.mark.parametrize("activation", PLAIN)
def test_a_plain_activation_is_its_function_of_the_one_projection(activation):
    x = normal(3, 1, 5, scale=3)
    want = PLAIN[activation](x[:, 0].astype(np.float64))
    np.testing.assert_allclose(activate(jnp.asarray(x), activation), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", GATED)
def test_a_gated_activation_multiplies_its_function_of_the_gate_by_up(activation):
    x = normal(3, 2, 5, scale=3)
    gate, up = x[:, 0].astype(np.float64), x[:, 1].astype(np.float64)
    want = GATED[activation](gate) * up
    np.testing.assert_allclose(activate(jnp.asarray(x), activation), want, rtol=1e-5, atol=1e-6)


def test_every_activation_has_a_function():
    assert {*PLAIN, *GATED} == set(Activation)
    assert {a for a in Activation if a.num_projections == 2} == set(GATED)
