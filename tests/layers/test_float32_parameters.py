"""Biases, scales and sinks in float32 do not change the dtype of a layer's output."""

import jax.numpy as jnp
import pytest

from moelib.core.precision import cast_parameters
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.linear import Linear
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
    plain_moe(input_dim=D),
]


@pytest.mark.parametrize("cfg", LAYERS, ids=lambda cfg: cfg.klass.__name__)
def test_a_layer_in_bfloat16_returns_bfloat16(cfg):
    if "experts" in cfg:
        cfg = cfg.clone(experts=cfg.experts.clone(bias=True))
    layer = build(cfg)
    specs = layer.create_parameter_specs_recursively()
    params = cast_parameters(initial(layer), specs, "bfloat16")
    x = jnp.asarray(normal(2, 4, D), jnp.bfloat16)
    inputs = {}
    if isinstance(cfg, GroupedQueryAttention.Config):
        inputs = {"positions": jnp.broadcast_to(jnp.arange(4)[None], (2, 4))}
    assert call(layer, params, x, **inputs).dtype == jnp.bfloat16
