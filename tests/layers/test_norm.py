"""RMSNorm and LayerNorm against their formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core.errors import UserError
from moelib.layers.norm import LayerNorm, RMSNorm
from tests.layers.calling import build, call, initial, normal

SCALE, BIAS = normal(6, seed=1), normal(6, seed=2)


@pytest.mark.parametrize("shape", [(2, 6), (2, 3, 6), (2, 3, 4, 6)])
def test_rms_norm_divides_by_the_root_mean_square(shape):
    layer = build(RMSNorm.default_config(), dim=6, eps=0.1)
    x = normal(*shape)
    x64 = x.astype(np.float64)
    want = x64 / np.sqrt(np.mean(x64**2, -1, keepdims=True) + 0.1) * SCALE
    got = call(layer, {"scale": jnp.asarray(SCALE)}, jnp.asarray(x))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_the_parameter_of_a_zero_centered_norm_is_its_scale_minus_one():
    plain, centered = (
        build(RMSNorm.default_config(), dim=6, zero_centered=on) for on in (False, True)
    )
    x = jnp.asarray(normal(2, 6))
    got = call(centered, {"scale": jnp.asarray(SCALE)}, x)
    np.testing.assert_allclose(got, call(plain, {"scale": jnp.asarray(SCALE + 1)}, x), rtol=1e-6)
    np.testing.assert_array_equal(initial(centered)["scale"], np.zeros(6))


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_takes_the_mean_away_and_divides_by_the_deviation(bias):
    layer = build(LayerNorm.default_config(), dim=6, eps=0.1, bias=bias)
    x = normal(2, 3, 6)
    x64 = x.astype(np.float64)
    want = (x64 - x64.mean(-1, keepdims=True)) / np.sqrt(x64.var(-1, keepdims=True) + 0.1) * SCALE
    params = {"scale": jnp.asarray(SCALE)} | ({"bias": jnp.asarray(BIAS)} if bias else {})
    got = call(layer, params, jnp.asarray(x))
    np.testing.assert_allclose(got, want + (BIAS if bias else 0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("norm", [RMSNorm, LayerNorm])
def test_norms_start_as_plain_ones_and_are_not_decayed(norm):
    layer = build(norm.default_config(), dim=6)
    np.testing.assert_array_equal(initial(layer)["scale"], np.ones(6))
    specs = layer.layer_parameter_specs()
    assert all(spec.weight_decay_scale == 0 for spec in specs.values())


@pytest.mark.parametrize("norm", [RMSNorm, LayerNorm])
def test_bfloat16_is_normalised_in_float32(norm):
    layer = build(norm.default_config(), dim=256)
    x = jnp.asarray(normal(4, 256, scale=100), jnp.bfloat16)
    got = call(layer, initial(layer), x)
    exact = call(layer, initial(layer), x.astype(jnp.float32))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, exact.astype(jnp.bfloat16))


@pytest.mark.parametrize("norm", [RMSNorm, LayerNorm])
def test_zeros_have_a_finite_output_and_gradient(norm):
    layer = build(norm.default_config(), dim=6)
    params = initial(layer)
    value, grad = jax.value_and_grad(lambda x: jnp.sum(call(layer, params, x)))(jnp.zeros((2, 6)))
    assert float(value) == 0
    assert np.isfinite(grad).all()


def test_groups_that_do_not_divide_the_dimension_are_refused():
    with pytest.raises(UserError, match="num_groups=3 does not divide dim=10"):
        build(RMSNorm.default_config(), dim=10, num_groups=3)
