"""Biases stay in float32, and do not change the dtype of what they are added to."""

import jax
import jax.numpy as jnp
import pytest

from moelib.core.module import functional
from moelib.core.param import cast_parameters
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.linear import Linear

ATTENTION = GroupedQueryAttention.default_config().set(
    num_heads=2, num_kv_heads=1, qkv_bias=True, output_bias=True
)


@pytest.mark.parametrize(
    ("cfg", "biases"),
    [(Linear.default_config().set(output_dim=4, bias=True), 1), (ATTENTION, 3)],
)
def test_results_have_the_dtype_of_the_inputs(cfg, biases):
    layer = cfg.clone(name="layer", input_dim=8).instantiate(parent=None)
    params = layer.initialize_parameters_recursively(jax.random.key(0))
    params = cast_parameters(params, layer.create_parameter_specs_recursively(), "bfloat16")
    assert sum(x.dtype == jnp.float32 for x in jax.tree.leaves(params)) >= biases
    x = jnp.ones((1, 3, 8), jnp.bfloat16)
    ids = {"positions": jnp.arange(3)[None], "segment_ids": jnp.ones((1, 3), jnp.int32)}
    inputs = {"x": x} | (ids if cfg is ATTENTION else {})
    y, _ = functional(layer, None, params, inputs, is_training=False)
    assert y.dtype == jnp.bfloat16
