import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.learner.ema import param_ema
from tests.learner.example import assert_same_bits


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.999, 0.99999])
def test_first_average_is_the_first_parameters_bit_for_bit(decay):
    params = {"w": jax.random.normal(jax.random.key(0), (50,))}
    ema = param_ema(decay=decay)
    state = ema.init({"w": jnp.full((50,), 123.0)})
    assert_same_bits(ema.update(params, state).params, params)


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.999, 0.99999])
def test_average_is_the_weighted_sum(decay):
    ema = param_ema(decay=decay)
    values = np.random.default_rng(0).normal(size=(20, 7))
    state = ema.init({"w": jnp.zeros(7)})
    for value in values:
        state = ema.update({"w": jnp.asarray(value, jnp.float32)}, state)
    weights = np.float64(decay) ** np.arange(19, -1, -1)
    expected = (weights[:, None] * values).sum(0) / weights.sum()
    np.testing.assert_allclose(state.params["w"], expected, rtol=1e-5, atol=1e-6)


def test_low_precision_parameters_are_averaged_in_float32():
    ema = param_ema(decay=0.999)
    state = ema.init({"w": jnp.zeros(2, jnp.bfloat16)})
    state = ema.update({"w": jnp.ones(2, jnp.bfloat16)}, state)
    assert state.params["w"].dtype == jnp.float32


def test_initial_average_does_not_share_buffers_with_the_parameters():
    params = {"w": jnp.ones(3)}
    state = param_ema(decay=0.9).init(params)
    jax.jit(lambda p: p, donate_argnums=0)(params)
    np.testing.assert_array_equal(state.params["w"], np.ones(3))


def test_no_decay_is_no_average():
    assert param_ema() is None
