"""Linear: x W + b."""

import jax.numpy as jnp
import numpy as np
import pytest

from moelib.layers.linear import Linear
from tests.layers.calling import build, call, float64, initial, normal


@pytest.mark.parametrize(("shape", "bias"), [((3,), False), ((2, 3), True), ((2, 5, 3), True)])
def test_the_last_dimension_is_mapped(shape, bias):
    layer = build(Linear.default_config(), input_dim=3, output_dim=4, bias=bias)
    params = initial(layer)
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


def test_flops_are_two_a_weight():
    layer = build(Linear.default_config(), input_dim=3, output_dim=4)
    assert layer.forward_flops_per_token(8) == 2 * 3 * 4
