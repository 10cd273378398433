"""Biases, scales and sinks in float32 do not change the dtype of a layer's output."""

import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core.precision import cast_parameters
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.linear import Linear
from moelib.layers.moe.experts import FeedForwardExperts
from moelib.layers.moe.router import Router
from moelib.layers.norm import LayerNorm
from tests.layers.calling import build, call, initial, normal
from tests.tiny import plain_moe

D = 16
LAYERS = [
    Linear.default_config().set(input_dim=D, output_dim=D, bias=True),
    LayerNorm.default_config().set(dim=D),
    GroupedQueryAttention.default_config().set(
        input_dim=D, num_heads=2, qkv_bias=True, output_bias=True, sinks=True
    ),
    plain_moe(
        input_dim=D,
        router=Router.default_config().set(bias=True),
        experts=FeedForwardExperts.default_config().set(bias=True),
    ),
]


@pytest.mark.parametrize("cfg", LAYERS, ids=lambda cfg: cfg.klass.__name__)
def test_a_layer_in_bfloat16_returns_bfloat16(cfg):
    layer = build(cfg)
    specs = layer.create_parameter_specs_recursively()
    params = cast_parameters(initial(layer), specs, "bfloat16")
    x = normal(2, 4, D).astype(jnp.bfloat16)
    positions = np.arange(8).reshape(2, 4) % 4
    inputs = {"positions": positions} if isinstance(cfg, GroupedQueryAttention.Config) else {}
    assert call(layer, params, x, **inputs).dtype == jnp.bfloat16
