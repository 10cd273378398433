"""Layers output their routing only if it is asked for, and then without padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from experiments.variants.moe_plus_plus import ResidualRouter, ZeroComputationExperts
from moelib.core.module import functional
from moelib.layers.carry import CARRIED
from moelib.layers.moe.layer import MoELayer
from moelib.layers.moe.recording import RECORDING, RecordedRouting
from tests.layers.calling import build, initial, normal

B, S, D, E, K = 2, 4, 8, 4, 2
MASK = np.arange(B * S).reshape(B, S) < 6


CFG = MoELayer.default_config().set(
    input_dim=D, hidden_dim=D, num_experts=E, num_experts_per_token=K
)


def outputs(inherited, **fields):
    layer = build(CFG, **fields)
    run = functools.partial(functional, layer, None, is_training=False, inherited=inherited)
    return jax.jit(run)(initial(layer), (normal(B, S, D), MASK))[1].module_outputs


def test_a_layer_outputs_its_routing_only_if_it_is_recorded():
    assert outputs({}) == {}
    found: RecordedRouting = outputs({RECORDING: True})["routing"]
    assert found.expert_ids.shape == (B, S, K)
    assert found.expert_ids.dtype == jnp.uint8
    assert found.weights.dtype == found.entropy.dtype == jnp.float16
    ids = np.asarray(found.expert_ids)
    assert (ids[MASK] < E).all()
    assert (ids[~MASK] == E).all()  # No expert.
    assert (np.asarray(found.weights)[~MASK] == 0).all()
    np.testing.assert_array_equal(found.mask, MASK)


def test_experts_that_get_no_rows_are_recorded_as_no_expert():
    """A router may select local experts, with ids from E on; dispatchers know E experts."""
    fields = {
        "router": ResidualRouter.default_config(),
        "local_experts": ZeroComputationExperts.default_config(),
        "load_balance_loss": None,
        "router_z_loss": None,
    }
    values = {RECORDING: True, CARRIED: {"router_logits": jnp.zeros((B, S, E + 3))}}
    found = outputs(values, **fields)["routing"]
    ids, weights = np.asarray(found.expert_ids), np.asarray(found.weights)
    assert ids.max() == E
    assert (ids[MASK] < E).any()
    assert (ids[MASK] == E).any()
    assert ((weights > 0) == (ids < E)).all()
