"""Experts: their outputs, batched or grouped, and their costs."""

import jax
import numpy as np
import pytest

from moelib.layers.activation import Activation
from moelib.layers.feed_forward import FeedForward
from moelib.layers.moe.experts import FeedForwardExperts
from tests.layers.calling import build, call, initial, normal

D, F, E, K = 4, 6, 3, 2


def experts(activation=Activation.SWIGLU, **fields):
    return build(
        FeedForwardExperts.default_config(),
        num_experts=E,
        num_experts_per_token=K,
        input_dim=D,
        hidden_dim=F,
        activation=activation,
        **fields,
    )


@pytest.mark.parametrize("activation", [Activation.SWIGLU, Activation.GELU])
def test_each_expert_is_a_feed_forward_layer(activation):
    layer, x = experts(activation), normal(7, D)
    params = jax.device_get(initial(layer))
    got = jax.jit(layer.batched)(params, np.broadcast_to(x[None], (E, 7, D)))  # [E, 7, D]
    one = build(FeedForward.default_config(), input_dim=D, hidden_dim=F, activation=activation)
    for e in range(E):
        mine = {name: value[e] for name, value in params.items()}
        np.testing.assert_allclose(got[e], call(one, mine, x[None])[0], rtol=1e-5, atol=1e-6)


def test_grouped_rows_meet_their_own_expert_and_rows_past_the_end_give_zeros():
    layer, rows, weights = experts(), normal(8, D), normal(8, seed=1)
    params = initial(layer)
    got = jax.jit(layer.grouped)(params, rows, np.array([2, 0, 4], np.int32), weights)
    every = jax.jit(layer.batched)(params, np.broadcast_to(rows[None], (E, 8, D)))
    every = np.asarray(every) * weights[None, :, None]
    np.testing.assert_allclose(got[:2], every[0, :2], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got[2:6], every[2, 2:6], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got[6:], np.zeros((2, D)))


@pytest.mark.parametrize("activation", Activation)
def test_the_kernels_for_tpus_take_every_activation(activation):
    layer, sizes = experts(activation), np.array([2, 0, 4], np.int32)
    traced = jax.jit(layer.grouped).trace(initial(layer), normal(8, D), sizes, normal(8))
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


def test_biases_of_a_token_are_summed_with_its_weights():
    layer, weights, bias = experts(bias=True), normal(3, K), normal(E, D, seed=1)
    ids = np.array([[0, 2], [1, E], [E, E]], np.int32)  # E stands for no expert.
    got = jax.jit(layer.weighted_biases)({"down_bias": bias}, ids, weights)
    want = [weights[0, 0] * bias[0] + weights[0, 1] * bias[2], weights[1, 0] * bias[1], 0 * bias[0]]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert jax.jit(experts().weighted_biases)({}, ids, weights) is None


def test_a_token_pays_for_its_own_experts_only():
    layer = experts()
    assert layer.active_parameters() == K * 3 * D * F
    for made in (layer, experts(bias=True)):  # A bias adds no matmul.
        assert made.forward_flops_per_token(8) == 2 * K * 3 * D * F
    specs = layer.create_parameter_specs_recursively()
    assert sum(spec.size for spec in specs.values()) == E * 3 * D * F
