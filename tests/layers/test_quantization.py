"""Which weights are quantized, when, and what it costs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core import tree
from moelib.core.module import functional
from moelib.core.param import specs_by_path
from moelib.layers.attention.latent import LatentAttention
from moelib.layers.linear import Linear
from moelib.layers.quantization import Quantization, QuantizedWeight, quantized_weights
from tests import tiny
from tests.layers.calling import QUICK, build, call, normal

FP8 = Quantization.FP8_BLOCK
ALL = {"q", "kv", "output", "experts/up", "experts/down", "shared_experts/up"}
ALL |= {"shared_experts/down"}


def model_config(scheme=FP8):
    # No activation has the shape of a weight.
    shared = tiny.FeedForward.default_config().set(hidden_dim=40)
    decoder = tiny.decoder(hidden_dim=24, shared_experts=shared)
    return tiny.model_config(decoder).set(quantization=scheme)


def test_projections_and_experts_are_quantized_and_nothing_else():
    model = model_config().instantiate(parent=None)
    specs = specs_by_path(model.create_parameter_specs_recursively())
    found = {path for path, spec in specs.items() if spec.quantization}
    names = {"/".join(path.split("/")[3:]) for path in found}
    assert names == ALL
    assert {path.split("/")[0] for path in found} == {"decoder"}


def test_latent_attention_quantizes_all_its_projections():
    layer = LatentAttention.default_config().set(
        input_dim=16, num_heads=2, kv_lora_rank=8, nope_head_dim=4, rope_head_dim=4, v_head_dim=4
    )
    specs = build(layer, quantization=FP8).create_parameter_specs_recursively()
    quantized = {path for path, spec in specs_by_path(specs).items() if spec.quantization}
    assert quantized == {"q", "kv_down", "k_rope", "kv_up", "output"}


def test_a_layer_inside_can_be_excluded():
    cfg = model_config()
    cfg.decoder.block[0].self_attention.quantization = Quantization.NONE
    specs = cfg.instantiate(parent=None).create_parameter_specs_recursively()
    quantized = [path for path, spec in specs_by_path(specs).items() if spec.quantization]
    assert not any("self_attention" in path for path in quantized)
    assert any("experts" in path for path in quantized)


def test_a_quantized_head_is_refused():
    cfg = model_config()
    cfg.lm_head.quantization = FP8
    with pytest.raises(ValueError, match=r"lm_head\.quantization is .*FP8_BLOCK"):
        cfg.instantiate(parent=None)


def test_a_weight_quantized_before_the_step_gives_the_gradient_of_one_quantized_at_use():
    layer = build(tiny.plain_moe(), input_dim=tiny.DIM, quantization=FP8)
    params, x = tiny.initial(layer), normal(2, 8, tiny.DIM)
    weights = quantized_weights(params, layer.create_parameter_specs_recursively(), None)
    assert weights.keys() == {"experts/up", "experts/down"}

    def before(params):
        used = lambda path, x: QuantizedWeight(weights[path], x) if path in weights else x
        return at_use(tree.map_by_path(used, params))

    def at_use(params):
        inputs = (jnp.asarray(x),)
        return jnp.sum(functional(layer, None, params, inputs, is_training=True)[0] ** 2)

    both = lambda params: [jax.value_and_grad(fn)(params) for fn in (before, at_use)]
    tiny.assert_trees_close(*jax.jit(both, compiler_options=QUICK)(params), tolerance=1e-6)


def test_a_layer_without_weights_to_quantize_refuses_a_scheme():
    cfg = model_config(None)
    cfg.embedding.quantization = FP8
    model = cfg.instantiate(parent=None)
    with pytest.raises(ValueError, match=r"embedding: quantization=.*FP8_BLOCK"):
        model.create_parameter_specs_recursively()


@pytest.mark.parametrize("scheme", [FP8, Quantization.INT8_BLOCK])
def test_nan_stays_visible(scheme):
    layer = build(Linear.default_config(), input_dim=8, output_dim=4, quantization=scheme)
    x, weight = normal(2, 3, 8), normal(8, 4, seed=1)
    x[1, 2, 3] = np.nan
    y = np.asarray(call(layer, {"weight": weight}, x))
    assert np.isnan(y[1, 2]).all()
    assert np.isfinite(y).sum() == y.size - 4
    weight[0, 0] = np.nan
    assert np.isnan(np.asarray(call(layer, {"weight": weight}, x))).all()


def test_zeros_give_exact_zeros():
    layer = build(Linear.default_config(), input_dim=8, output_dim=4, quantization=FP8)
    assert not np.asarray(call(layer, {"weight": normal(8, 4)}, np.zeros((2, 3, 8)))).any()


def test_a_weight_is_8_bits_wide():
    layer = build(Linear.default_config(), input_dim=8, output_dim=4, quantization=FP8)
    weight = layer.operands({"weight": jnp.asarray(normal(8, 4))}, jnp.float32)["weight"]
    assert isinstance(weight, QuantizedWeight)
    assert weight.quantized.values.nbytes == weight.gradient_of.nbytes // 4
