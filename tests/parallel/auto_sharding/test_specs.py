"""Specs from a trace equal those by hand, on lists without names and for the library's models."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from benchmarks import sharding_models
from benchmarks.auto_sharding import foreign_models, hand_specs, without_names
from moelib import launch
from moelib.core import tree
from moelib.core.errors import UserError
from moelib.core.jaxpr import abstract_parameters, forward_pass
from moelib.core.param import ParameterSpec, is_spec
from moelib.data.input import batch_spec
from moelib.parallel.auto_sharding import rules
from moelib.parallel.auto_sharding.specs import auto_partition_specs
from moelib.parallel.sharding import partition_spec


@pytest.fixture(autouse=True)
def _promotion():
    with foreign_models():
        yield


_EQUAL = sharding_models.models()[:-1]  # No one has written specs for the LSTM.


@pytest.mark.parametrize("build", _EQUAL)
def test_traced_specs_equal_those_by_hand(build):
    model = build()
    anonymous, hand = without_names(model), hand_specs(model)
    num_shards = 2 if "scan" in model.name else 8
    found = auto_partition_specs(
        anonymous.loss, anonymous.params, *model.batch, num_shards=num_shards
    )
    assert found.specs == hand
    assert not found.report.unknown


_OWN = [("open_models", "qwen3-30b-a3b", 4), ("flame_moe", "flame-moe-tiny", 2)]
_SLOW = [
    ("open_models", "llama-3.1-8b", 8),
    ("open_models", "mixtral-8x7b", 8),
    ("open_models", "qwen2-57b-a14b", 4),
    ("open_models", "deepseek-v2-lite", 4),
    ("gpt_oss", "gpt-oss-20b", 8),
]


@pytest.mark.parametrize(
    ("module", "name", "num_shards"),
    [*_OWN, *(pytest.param(*each, marks=pytest.mark.slow) for each in _SLOW)],
)
def test_specs_of_own_models_equal_the_table(module, name, num_shards):
    cfg = launch.load_config(f"experiments.{module}", name)
    model = cfg.set(dir="unused").instantiate(parent=None).model
    specs = model.create_parameter_specs_recursively()
    batch = {
        k: jax.ShapeDtypeStruct(v, "int32") for k, v in batch_spec(1, cfg.input.seq_len).items()
    }
    loss = lambda params, batch: forward_pass(model)(params, batch)[0][0]
    found = auto_partition_specs(loss, abstract_parameters(specs), batch, num_shards=num_shards)
    is_split = lambda x: isinstance(x, P)
    named = lambda entry: [axis for axis in entry if axis] and tuple(entry)
    for path, spec in tree.flatten_items(specs, is_leaf=is_spec):
        by_table = partition_spec(spec.axes, {"model": num_shards}, shape=spec.shape)
        traced = dict(tree.flatten_items(found.specs, is_leaf=is_split))[path]
        padded = (*traced, *(None,) * (len(spec.shape) - len(traced)))
        assert named(padded) == named(by_table), path
    assert not found.report.unknown


def _network(params, x):
    return jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"]


_PARAMS = {"up": jnp.zeros((128, 256)), "bias": jnp.zeros(256), "down": jnp.zeros((256, 128))}
_COLUMN_ROW = {"up": P(None, "model"), "bias": P("model"), "down": P("model")}
_X = jnp.ones((4, 128))


def test_neighbors_of_an_override_follow():
    overrides = [("down", P("model"))]
    found = auto_partition_specs(_network, _PARAMS, _X, num_shards=4, overrides=overrides)
    assert found.specs == _COLUMN_ROW


def test_annotations_are_kept_and_neighbors_follow():
    params = _PARAMS | {"up": ParameterSpec((128, 256), ("embed", "ffn"))}
    found = auto_partition_specs(_network, params, _X, num_shards=4)
    assert found.specs == _COLUMN_ROW


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_shards": 7}, "num_shards=7"),
        ({"num_shards": 4, "overrides": [("head", P("model"))]}, "'head'"),
        (
            {"num_shards": 4, "overrides": [("up", P("model")), ("bias", P("model"))]},
            "up cannot be sharded along dimension 0",
        ),
        (
            {"num_shards": 4, "overrides": [("bias", P("model")), ("scale", P("model"))]},
            "bias and scale contradict",
        ),
        ({"num_shards": 4, "leftover": "error"}, "leftover='error': 1 parameters.*first odd"),
    ],
)
def test_impossible_settings_are_refused(options, message):
    params = _PARAMS | {"odd": jnp.zeros((128, 129)), "scale": jnp.zeros(128)}
    function = lambda p, x: (_network(p, x) * p["scale"], x @ p["odd"])
    with pytest.raises(UserError, match=message):
        auto_partition_specs(function, params, _X, **options)


def test_a_leftover_is_stored_in_parts():
    """A dimension that 4 does not divide stays whole; its storage is sharded along the other."""
    params = {"up": jnp.zeros((128, 257)), "down": jnp.zeros((257, 128))}
    function = lambda p, x: jnp.tanh(x @ p["up"]) @ p["down"] + x
    for leftover, stored in (("replicate", P()), ("fsdp", P("model"))):
        found = auto_partition_specs(function, params, _X, num_shards=4, leftover=leftover)
        assert (found.specs["up"], found.use_specs["up"]) == (stored, P())
        assert "size 257 is not divisible by 4" in found.report.whole["up"]


def test_a_parameter_that_is_not_used_is_reported():
    found = auto_partition_specs(_network, _PARAMS | {"spare": jnp.zeros(8)}, _X, num_shards=4)
    assert found.report.unused == ("spare",)
    assert "unused: spare" in str(found.report)


def _multiply(x, w):
    def kernel(x_ref, w_ref, out_ref):
        out_ref[...] = x_ref[...] @ w_ref[...]

    shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
    return pl.pallas_call(kernel, shape, name="own_product", interpret=True)(x, w)


def _with_kernels(params, x):
    return _multiply(jnp.tanh(_multiply(x, params["up"]) + params["bias"]), params["down"])


def test_kernels_are_barriers_without_a_rule(monkeypatch):
    monkeypatch.setattr(rules, "_registered", {})
    found = auto_partition_specs(_with_kernels, _PARAMS, _X, num_shards=4)
    assert found.report.unknown == {"pallas_call:own_product": 2}
    assert "register_dimension_rule" in str(found.report)
    rules.register_dimension_rule("pallas_call:own_product", "m k, k n -> m n")
    found = auto_partition_specs(_with_kernels, _PARAMS, _X, num_shards=4)
    assert (found.specs, found.report.unknown) == (_COLUMN_ROW, {})
    rules.register_dimension_rule("pallas_call:own_product", "m k, g k n -> m n")
    with pytest.raises(UserError, match=r"operands have ranks \[2, 3\].*\[2, 2\]"):
        auto_partition_specs(_with_kernels, _PARAMS, _X, num_shards=4)


@pytest.mark.parametrize("text", ["m k k n", "m k -> m n; replicated q", "a-b -> c"])
def test_invalid_rules_are_refused(text):
    with pytest.raises(UserError, match="dimension rule"):
        rules.parse_dimension_rule(text)


def _in_shard_map(function):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = (P(), P("data"))
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=False)


def _in_while(function):
    body = lambda carry: (carry[0] + 1, function(carry[2], carry[1]), carry[2])
    return lambda p, x: jax.lax.while_loop(lambda c: c[0] < 3, body, (0, x, p))[1]


def _in_cond(function):
    return lambda p, x: jax.lax.cond(x.sum() > 0, function, lambda p, x: x, p, x)


def _in_custom_vjp(function):
    wrapped = jax.custom_vjp(function)
    wrapped.defvjp(
        lambda p, x: (function(p, x), (p, x)), lambda saved, g: jax.vjp(function, *saved)[1](g)
    )
    return wrapped


@pytest.mark.parametrize(
    "transform", [jax.jit, jax.checkpoint, _in_shard_map, _in_while, _in_cond, _in_custom_vjp]
)
def test_functions_inside_others_are_read(transform):
    found = auto_partition_specs(transform(_network), _PARAMS, _X, num_shards=4)
    assert (found.specs, found.report.unknown) == (_COLUMN_ROW, {})


def test_errors_of_the_function_keep_their_traceback():
    def broken(params, x):
        raise KeyError("my own error")

    with pytest.raises(KeyError, match="my own error"):
        auto_partition_specs(broken, _PARAMS, _X, num_shards=4)


def test_shapes_alone_give_columns_and_rows():
    found = auto_partition_specs(None, {"a": _PARAMS["up"], "b": _PARAMS["down"]}, num_shards=4)
    assert found.specs == {"a": P(None, "model"), "b": P("model")}


@pytest.mark.parametrize("given", [P("fsdp"), P(None, ("fsdp", "model"))])
def test_storage_takes_no_axis_twice(given):
    found = auto_partition_specs(
        _network, _PARAMS, _X, num_shards=4, fsdp_shards=2, overrides=[("up", given)]
    )
    assert found.specs["up"] == given


def test_a_sum_that_is_scattered_inside_of_a_shard_map_is_a_barrier():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    scatter = lambda x: jax.lax.psum_scatter(x, "data", scatter_dimension=1, tiled=True)
    mapped = jax.shard_map(
        scatter, mesh=mesh, in_specs=P("data"), out_specs=P("data", None), check_vma=False
    )
    found = auto_partition_specs(
        lambda p, x: mapped(_network(p, x)).sum(), _PARAMS, _X, num_shards=4
    )
    assert found.report.unknown == {"reduce_scatter": 1}


def test_parameters_without_dimensions_stay_whole():
    found = auto_partition_specs(
        lambda p, x: p["scale"] * x, {"scale": jnp.ones(())}, _X, num_shards=4
    )
    assert found.specs == {"scale": P()}
