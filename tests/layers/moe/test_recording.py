"""Layers output their routing only inside `recording_routing`, and then without padding."""

import jax.numpy as jnp
import numpy as np

from moelib.core.module import functional
from moelib.layers.moe.layer import MoELayer
from moelib.layers.moe.recording import RecordedRouting, recording_routing
from tests.layers.calling import build, initial, normal

B, S, D, E, K = 2, 4, 8, 4, 2
MASK = np.arange(B * S).reshape(B, S) < 6


def outputs(recording):
    layer = build(
        MoELayer.default_config().set(
            input_dim=D, hidden_dim=D, num_experts=E, num_experts_per_token=K
        )
    )
    inputs = (jnp.asarray(normal(B, S, D)), jnp.asarray(MASK))
    params = initial(layer)
    if recording:
        with recording_routing():
            return functional(layer, None, params, inputs, is_training=False)[1].module_outputs
    return functional(layer, None, params, inputs, is_training=False)[1].module_outputs


def test_a_layer_outputs_its_routing_only_if_it_is_recorded():
    assert outputs(recording=False) == {}
    found: RecordedRouting = outputs(recording=True)["routing"]
    assert found.expert_ids.shape == (B, S, K)
    assert found.expert_ids.dtype == jnp.uint8
    assert found.weights.dtype == found.entropy.dtype == jnp.float16
    ids = np.asarray(found.expert_ids)
    assert (ids[MASK] < E).all()
    assert (ids[~MASK] == E).all()  # No expert.
    assert (np.asarray(found.weights)[~MASK] == 0).all()
    np.testing.assert_array_equal(found.mask, MASK)
