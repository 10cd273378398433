"""Gradients and collectives under specs from a trace, on meshes of FSDP and tensor parallelism."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import sharding_models
from benchmarks.auto_sharding import foreign_models, gradient_error, without_names
from moelib.parallel.auto_sharding.constrain import constrain_at_use
from moelib.parallel.auto_sharding.specs import auto_partition_specs
from moelib.planning.choose_specs import compile_sharded
from moelib.planning.compiled.compile_step import no_compilation_cache
from moelib.planning.hardware.topologies import topology
from moelib.planning.hlo import program
from moelib.planning.report.collectives import collectives_by_axes
from tests.layers.calling import normal

_MODELS = sharding_models.models()
_FAST = [(2, (2, 4))]  # Llama with a scan over rematerialized layers.
_SLOW = [
    (i, mesh)
    for i in range(len(_MODELS))
    for mesh in ((1, 8), (2, 4), (4, 2))
    if (i, mesh) not in _FAST
]


def _mesh(shape):
    return jax.make_mesh(shape, ("fsdp", "model"), axis_types=(AxisType.Auto,) * 2)


def _found(model, shape):
    return auto_partition_specs(
        model.loss, model.params, *model.batch, num_shards=shape[1], fsdp_shards=shape[0]
    )


@pytest.mark.parametrize(
    ("index", "shape"), [*_FAST, *(pytest.param(*each, marks=pytest.mark.slow) for each in _SLOW)]
)
def test_gradients_equal_those_of_one_device(index, shape):
    with foreign_models():
        model = without_names(_MODELS[index]())
        assert gradient_error(model, _found(model, shape), _mesh(shape)) < 1e-5


WINDOWS = [(4, 4, 1), (2, 2, 1), (14, 14, 1), (16, 16, 1), (16, 2, 1), (4, 1, 2)]


@pytest.mark.parametrize(
    ("window", "stride", "dilation", "shape"),
    [
        pytest.param(*each, shape, marks=[pytest.mark.slow] * (i > 0 and shape != (2, 4)))
        for i, each in enumerate(WINDOWS)
        for shape in ((1, 8), (2, 4), (4, 2))
    ],
)
def test_gradients_of_convolutions_equal_those_of_one_device(window, stride, dilation, shape):
    """Patch embeddings, whose batch is not placed, with positions of the image and the patches."""
    size = 2 * window if stride == window else 32
    patches = (size - dilation * (window - 1) - 1) // stride + 1

    def loss(params, x):
        y = jax.lax.conv_general_dilated(
            x + params["pixel"][None],
            params["kernel"],
            (stride, stride),
            "VALID",
            rhs_dilation=(dilation, dilation),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        y = jnp.tanh((y + params["position"][None]).reshape(len(x), -1, 128) @ params["up"])
        return jnp.square(y @ params["down"]).mean()

    shapes = {
        "kernel": (window, window, 3, 128),
        "pixel": (size, size, 3),
        "position": (patches, patches, 128),
        "up": (128, 512),
        "down": (512, 128),
    }
    params = {name: normal(*each, scale=0.1) for name, each in shapes.items()}
    x = normal(8, size, size, 3, seed=1)
    specs = auto_partition_specs(loss, params, x, num_shards=shape[1], fsdp_shards=shape[0]).specs
    mesh, step = _mesh(shape), jax.jit(jax.value_and_grad(loss))
    placed = {
        name: jax.device_put(p, NamedSharding(mesh, specs[name])) for name, p in params.items()
    }
    found, right = jax.device_get(step(placed, x)), jax.device_get(step(params, x))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


def test_fsdp_gathers_parameters_where_they_are_used():
    """Two layers: 14 sums of activations, and a gather per matrix; no activation is moved."""
    model, mesh = without_names(_MODELS[0]()), _mesh((2, 4))
    with foreign_models():
        found = _found(model, (2, 4))
        step = jax.value_and_grad(constrain_at_use(model.loss, found.use_specs))
        text = compile_sharded(step, model.params, model.batch, found.specs, mesh, "model")
    kinds = {}
    for each in collectives_by_axes(program.parse(text), dict(mesh.shape)):
        kinds[each.kind] = kinds.get(each.kind, 0) + each.count
    assert kinds == {"all-reduce": 14, "all-gather": 16}


@pytest.mark.slow
@pytest.mark.parametrize("build", [_MODELS[0], sharding_models.flax_attention])
def test_tpus_sum_as_few_arrays_as_two_layers_need(build):
    """10 sums of activations, and the softmax's sums of scalars per token in two others."""
    pytest.importorskip("libtpu")
    devices = np.array(topology("v5e:2x4").devices).reshape(1, 8)
    mesh = jax.sharding.Mesh(devices, ("fsdp", "model"), axis_types=(AxisType.Auto,) * 2)
    with foreign_models():
        model = without_names(build())
        specs = _found(model, (1, 8)).specs
        with no_compilation_cache():
            step = jax.value_and_grad(model.loss)
            text = compile_sharded(step, model.params, model.batch, specs, mesh, "model")
    found = collectives_by_axes(program.parse(text), dict(mesh.shape))
    tokens = sharding_models.BATCH * sharding_models.LENGTH
    assert {(each.kind, each.axes) for each in found} == {("all-reduce", ("model",))}
    assert sum(each.count for each in found) == 12
    activations = 10 * 4 * tokens * sharding_models.WIDTH
    assert activations <= sum(each.bytes for each in found) <= activations + 4 * 4 * tokens


def test_a_parameter_that_is_used_whole_is_gathered_layer_by_layer():
    mesh = _mesh((8, 1))
    layers = jax.ShapeDtypeStruct((6, 128, 128), "float32")

    def loss(params, x):
        step = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
        return jax.lax.scan(step, x, params)[0].sum()

    step = jax.value_and_grad(constrain_at_use(loss, P()))
    batch = (jax.ShapeDtypeStruct((8, 128), "float32"),)
    text = compile_sharded(step, layers, batch, P(None, "fsdp"), mesh, "model")
    gathered = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text)
    assert gathered
    assert "6,128,128" not in gathered
