"""Which weights are quantized, when, and what it costs."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core import jaxpr
from moelib.core.errors import UserError
from moelib.core.module import functional
from moelib.core.param import is_spec, specs_by_path
from moelib.core.precision import read_parameters
from moelib.kernels.backend import kernel_backends
from moelib.layers.attention.latent import LatentAttention
from moelib.layers.linear import Linear
from moelib.layers.quantization import Quantization, QuantizedWeight, quantized_weights
from moelib.layers.remat import remat
from moelib.parallel import sharding
from tests import tiny
from tests.layers.calling import build, call, normal

FP8 = Quantization.FP8_BLOCK
ALL = {"q", "kv", "output", "experts/up", "experts/down", "shared_experts/up"}
ALL |= {"shared_experts/down"}


def model_config(scheme=FP8):
    # No activation has the shape of a weight.
    shared = tiny.FeedForward.default_config().set(hidden_dim=40)
    decoder = tiny.decoder(hidden_dim=24, shared_experts=shared)
    return tiny.model_config(decoder).set(quantization=scheme)


def quantized(layer):
    """Returns the paths of the quantized parameters of a model or layer."""
    specs = specs_by_path(layer.create_parameter_specs_recursively())
    return {path for path, spec in specs.items() if spec.quantization}


def test_projections_and_experts_are_quantized_and_nothing_else():
    found = quantized(model_config().instantiate(parent=None))
    assert {"/".join(path.split("/")[3:]) for path in found} == ALL
    assert {path.split("/")[0] for path in found} == {"decoder"}


def test_latent_attention_quantizes_all_its_projections():
    layer = LatentAttention.default_config().set(
        input_dim=16, num_heads=2, kv_lora_rank=8, nope_head_dim=4, rope_head_dim=4, v_head_dim=4
    )
    found = quantized(build(layer, quantization=FP8))
    assert found == {"q", "kv_down", "k_rope", "kv_up", "output"}


def test_a_layer_inside_can_be_excluded():
    cfg = model_config()
    cfg.decoder.block[0].self_attention.quantization = Quantization.NONE
    found = quantized(cfg.instantiate(parent=None))
    assert found
    assert not any("self_attention" in path for path in found)


@pytest.mark.parametrize(
    ("of_model", "changes", "named"),
    [
        (None, {"lm_head": FP8}, r"lm_head\.quantization is .*FP8_BLOCK"),
        (None, {"embedding": FP8}, "embedding: quantization=.*FP8_BLOCK"),
        (FP8, {"decoder": Quantization.NONE}, "quantization=.*FP8_BLOCK, .* no weight"),
    ],
)
def test_schemes_that_apply_to_no_weight_are_refused(of_model, changes, named):
    cfg = model_config(of_model)
    for name, scheme in changes.items():
        getattr(cfg, name).quantization = scheme
    with pytest.raises(UserError, match=named):
        cfg.instantiate(parent=None).create_parameter_specs_recursively()


def test_a_weight_quantized_before_the_step_gives_the_gradient_of_one_quantized_at_use():
    layer = build(tiny.plain_moe(), input_dim=tiny.DIM, quantization=FP8)
    params, x = tiny.initial(layer), normal(2, 8, tiny.DIM)
    specs = layer.create_parameter_specs_recursively()
    weights = jax.jit(lambda params: quantized_weights(params, specs, None))(params)
    assert weights.keys() == {"experts/up", "experts/down"}

    def before(params):
        return at_use(read_parameters(params, specs_by_path(specs), None, weights))

    def at_use(params):
        inputs = (jnp.asarray(x),)
        return jnp.sum(functional(layer, None, params, inputs, is_training=True)[0] ** 2)

    both = lambda params: [jax.value_and_grad(fn)(params) for fn in (before, at_use)]
    tiny.assert_trees_close(*jax.jit(both)(params), tolerance=1e-6)


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


def gathers(scheme, **axes):
    """Returns {(dtype, size)} of the gathers in the compiled gradients of a layer of 512 x 256."""
    cfg = tiny.FeedForward.default_config().set(hidden_dim=256)
    layer = build(cfg, input_dim=512, quantization=scheme)
    specs, mesh = layer.create_parameter_specs_recursively(), tiny.mesh(**axes)

    def loss(params, x):
        y, _ = functional(layer, None, params, (x,), is_training=True)
        return jnp.sum(y * y)

    with jax.set_mesh(mesh):
        shardings = sharding.named_shardings(specs, mesh)
        given = jax.tree.map(
            lambda spec, of: jax.ShapeDtypeStruct(spec.shape, jnp.float32, sharding=of),
            specs,
            shardings,
            is_leaf=is_spec,
        )
        tokens = jax.NamedSharding(mesh, jax.P(("data", "fsdp")))
        x = jax.ShapeDtypeStruct((8, 16, 512), jnp.float32, sharding=tokens)
        step = jax.jit(jax.grad(loss), out_shardings=shardings)
        program = step.lower(given, x).compile().as_text() or ""
    found = re.findall(r"= (\w+)\[([\d,]+)\]\S* all-gather", program)
    return {(dtype, math.prod(map(int, shape.split(",")))) for dtype, shape in found}


@pytest.mark.parametrize("axes", [{"fsdp": 4}, {"fsdp": 2, "model": 2}])
def test_dense_weights_are_gathered_in_8_bits_forward_and_backward(axes):
    # XLA for CPUs has no 8-bit floats, but sends integers as they are.
    found = gathers(Quantization.INT8_BLOCK, **axes)
    part = 512 * 256 // axes.get("model", 1)
    assert {dtype for dtype, size in found if size >= part} == {"s8"}


def test_dots_of_8_bits_gather_no_tokens():
    with kernel_backends({"quantized_matmul": "float8"}):
        assert not gathers(Quantization.FP8_TENSOR, data=4)


@pytest.mark.parametrize(
    ("policy", "recomputed"), [("dots_saveable", 0), ("nothing_saveable", 2), (None, 2)]
)
def test_policies_of_dots_save_quantized_ones(policy, recomputed):
    layer = build(
        tiny.FeedForward.default_config().set(hidden_dim=8), input_dim=8, quantization=FP8
    )

    @remat(policy)
    def forward(params, x):
        return functional(layer, None, params, (x,), is_training=True)[0]

    loss = lambda params, x: jnp.sum(forward(params, x))
    program = jax.make_jaxpr(jax.grad(loss))(tiny.initial(layer), jnp.ones((1, 4, 8)))
    dots = [s for s in jaxpr.walk(program) if s.eqn.primitive.name == "dot_general"]
    assert len(dots) == 3 + 2 * 3 + recomputed  # The last product is not needed again.
