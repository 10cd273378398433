"""Adapters: values are those of merged weights, and gradients follow by the chain rule."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core import tree
from moelib.core.errors import UserError
from moelib.core.module import functional
from moelib.core.param import specs_by_path
from moelib.layers.adapter import LowRank
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.attention.latent import LatentAttention
from moelib.layers.feed_forward import FeedForward
from moelib.layers.linear import Linear
from moelib.layers.mixers.gated_delta_net import GatedDeltaNet
from moelib.layers.moe.dispatch import DenseDispatcher
from moelib.layers.moe.dispatch_capacity import CapacityDispatcher
from moelib.layers.moe.dispatch_ragged import RaggedDispatcher, RingDispatcher
from moelib.layers.norm import RMSNorm
from moelib.layers.quantization import Quantization
from tests import tiny
from tests.layers.calling import build, call, normal

DIM, RANK = 16, 3
X = normal(8, 8, DIM)
ADAPTER = LowRank.default_config().set(rank=RANK, alpha=6.0)


def attention():
    cfg = GroupedQueryAttention.default_config()
    return cfg.set(num_heads=4, num_kv_heads=2, output_gate=True, qkv_bias=True)


def latent(**fields):
    cfg = LatentAttention.default_config().set(num_heads=2, kv_lora_rank=8, q_lora_rank=6)
    return cfg.set(nope_head_dim=4, rope_head_dim=4, v_head_dim=6, **fields)


def experts(dispatcher=None, **fields):
    cfg = tiny.plain_moe(**fields)
    return cfg if dispatcher is None else cfg.set(dispatcher=dispatcher.default_config())


def delta_net():
    return GatedDeltaNet.default_config().set(
        num_value_heads=4, num_key_heads=2, key_head_dim=4, value_head_dim=4
    )


LAYERS = {
    "attention": attention(),
    "latent": latent(),
    "feed_forward": FeedForward.default_config().set(hidden_dim=24),
    "linear": Linear.default_config().set(output_dim=5, bias=True),
    "ragged": experts(),
    "dense": experts(DenseDispatcher),
    "capacity": experts(CapacityDispatcher),
    "delta_net": delta_net(),
}


def adapted(cfg, adapter=ADAPTER):
    cfg = cfg.clone()
    (cfg.experts if hasattr(cfg, "experts") else cfg).adapter = adapter.clone()
    return cfg


def inputs_of(layer):
    names = type(layer).forward.__annotations__
    positions = np.broadcast_to(np.arange(8, dtype=np.int32), (8, 8))
    return {"x": X} | ({"positions": positions} if "positions" in names else {})


def drawn(layer, seed=0):
    """Returns initial parameters, with B drawn too."""
    draw = lambda path, x: normal(*x.shape, seed=len(path) + seed) if path.endswith("_b") else x
    return tree.map_by_path(draw, tiny.initial(layer))


def merged(params, layer, scale):
    """Returns the parameters without adapters: W + scale A B of each matrix, by NumPy."""
    specs, leaves = specs_by_path(layer.create_parameter_specs_recursively()), tree.by_path(params)
    for path in [path for path in leaves if path.endswith("_lora_a")]:
        name, a = path.removesuffix("_lora_a"), np.asarray(leaves.pop(path), np.float64)
        b, weight = np.asarray(leaves.pop(f"{name}_lora_b")), np.array(leaves[name], np.float64)
        fan = specs[name].fan_axes
        matrices = np.moveaxis(weight, fan.batch_axis, range(len(fan.batch_axis)))
        of_a = specs[path].fan_axes.batch_axis
        a = np.moveaxis(a, of_a, range(len(of_a)))
        for index in np.ndindex(*(weight.shape[axis] for axis in fan.batch_axis)):
            inside = a[index].reshape(-1, RANK) @ b[index].reshape(RANK, -1)
            matrices[index] += scale * inside.reshape(matrices[index].shape)  # A view of `weight`.
        leaves[name] = weight.astype(np.float32)
    return tree.unflatten(leaves)


@functools.partial(jax.jit, static_argnums=0)
def gradients(layer, params, weights):
    def value(params):
        y = functional(
            layer, None, params, jax.tree.map(jnp.asarray, inputs_of(layer)), is_training=True
        )[0]
        return jnp.sum(y * weights)

    return jax.grad(value)(params)


def built(name, adapter=None):
    cfg = LAYERS[name] if adapter is None else adapted(LAYERS[name], adapter)
    return build(cfg, input_dim=DIM)


@pytest.mark.parametrize("name", LAYERS)
def test_an_adapter_equals_the_merged_weight(name):
    layer, plain = built(name, ADAPTER), built(name)
    params = drawn(layer)
    whole = merged(params, layer, scale=2.0)
    want = call(plain, whole, **inputs_of(plain))
    got = call(layer, params, **inputs_of(layer))
    assert np.abs(call(plain, tiny.initial(plain), **inputs_of(plain)) - want).max() > 0.1
    tiny.assert_trees_close(got, want)


def matrices(x, spec):
    """Returns an array as matrices [stacked, ...], its other dimensions in order."""
    stacked = spec.fan_axes.batch_axis
    x = np.moveaxis(np.asarray(x), stacked, range(len(stacked)))
    return x.reshape(-1, *x.shape[len(stacked) :])


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_follow_from_that_of_the_merged_weight(name):
    layer, plain = built(name, ADAPTER), built(name)
    params = drawn(layer)
    weights = normal(*X.shape[:2], 5 if name == "linear" else DIM, seed=5)
    got = tree.by_path(gradients(layer, params, weights))
    of_merged = tree.by_path(gradients(plain, merged(params, layer, 2.0), weights))
    specs = specs_by_path(layer.create_parameter_specs_recursively())
    leaves = tree.by_path(params)
    for of_a in [path for path in leaves if path.endswith("_lora_a")]:
        weight = of_a.removesuffix("_lora_a")
        of_b = f"{weight}_lora_b"
        a, b = (matrices(leaves[path], specs[path]) for path in (of_a, of_b))
        a, b = a.reshape(len(a), -1, RANK), b.reshape(len(b), RANK, -1)
        dw = matrices(of_merged.pop(weight), specs[weight]).reshape(len(a), a.shape[1], -1)
        da, db = (matrices(got.pop(path), specs[path]) for path in (of_a, of_b))
        tiny.assert_trees_close(da.reshape(a.shape), 2 * dw @ b.swapaxes(1, 2))
        tiny.assert_trees_close(db.reshape(b.shape), 2 * a.swapaxes(1, 2) @ dw)
        assert not np.any(got.pop(weight))  # The base gets none.
    tiny.assert_trees_close(got, of_merged)


def test_a_new_adapter_changes_nothing():
    layer = built("attention", ADAPTER)
    params = tiny.initial(layer)
    plain = {name: x for name, x in params.items() if "_lora_" not in name}
    want = call(built("attention"), plain, **inputs_of(layer))
    np.testing.assert_array_equal(call(layer, params, **inputs_of(layer)), want)
    bound = 1 / math.sqrt(DIM)  # PEFT: Kaiming uniform with a = sqrt(5).
    a = np.asarray(params["kv_lora_a"])
    assert a.shape == (DIM, 2, RANK)
    assert bound * 0.9 < np.abs(a).max() <= bound


def test_rank_stabilized_scale_divides_by_the_square_root():
    assert ADAPTER.set(rank=4).clone(rs_lora=True).instantiate().scale == 3.0
    assert ADAPTER.clone(rank=4).instantiate().scale == 1.5


@pytest.mark.parametrize("dispatcher", [RaggedDispatcher, RingDispatcher, CapacityDispatcher])
@pytest.mark.parametrize(
    "axes", [{"expert": 4}, {"fsdp": 2, "model": 2}, {"expert": 2, "model": 2}]
)
def test_adapted_experts_on_a_mesh_equal_one_device(dispatcher, axes):
    if dispatcher is CapacityDispatcher and "expert" not in axes:
        pytest.skip("the same computation as with experts")
    cfg = adapted(experts(dispatcher))
    layer = build(cfg, input_dim=DIM)
    params, weights = drawn(layer), normal(*X.shape, seed=5)
    want = gradients(layer, params, weights)
    with jax.set_mesh(tiny.mesh(**axes)):
        got = gradients(layer, params, weights)
    tiny.assert_trees_close(got, want)


def test_further_rounds_train_the_adapter_and_not_the_base():
    cfg = adapted(experts(num_experts=16, num_experts_per_token=1))
    layer = build(
        cfg.set(dispatcher=RaggedDispatcher.default_config().set(round_factor=0.2)), input_dim=DIM
    )
    params, weights = drawn(layer), normal(*X.shape, seed=5)
    want = gradients(layer, params, weights)
    with jax.set_mesh(tiny.mesh(expert=8)):
        got = gradients(layer, params, weights)
    tiny.assert_trees_close(got, want)


def test_an_adapter_of_a_quantized_weight_adds_to_its_product():
    fields = {"input_dim": DIM, "quantization": Quantization.FP8_BLOCK}
    for name in ("attention", "ragged"):
        layer, plain = build(adapted(LAYERS[name]), **fields), build(LAYERS[name], **fields)
        params = tiny.initial(layer)
        base = tree.select(params, lambda path: "_lora_" not in path)
        want = call(plain, base, **inputs_of(plain))
        np.testing.assert_array_equal(call(layer, params, **inputs_of(layer)), want)
        changed = call(layer, drawn(layer), **inputs_of(layer))
        assert np.abs(changed - want).max() > 0.1
        found = tree.by_path(gradients(layer, drawn(layer), normal(*X.shape)))
        assert all(np.any(x) for path, x in found.items() if "_lora_" in path)


def test_an_adapter_of_a_layer_without_projections_is_refused():
    layer = build(RMSNorm.default_config().set(dim=4, adapter=ADAPTER.clone()))
    with pytest.raises(UserError, match="layer: adapter is set, but RMSNorm has no weight"):
        layer.create_parameter_specs_recursively()


def test_rank_0_is_refused():
    with pytest.raises(ValueError, match="rank"):
        ADAPTER.clone(rank=0)


def test_an_adapter_of_the_head_is_refused():
    cfg = tiny.model_config()
    cfg.lm_head.adapter = ADAPTER.clone()
    with pytest.raises(UserError, match=r"lm_head\.adapter"):
        cfg.instantiate(parent=None)
