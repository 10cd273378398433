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
from moelib.data.batches.input import batch_spec
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


@pytest.mark.slow
def test_80_layers_are_sharded_like_two():
    model = sharding_models.llama("Llama", layers=80)
    anonymous = without_names(model)
    found = auto_partition_specs(anonymous.loss, anonymous.params, *model.batch, num_shards=8)
    assert found.specs == hand_specs(model)
    assert len(found.report.classes) == 2 + 2 * 80  # Vocabularies; heads and hidden dimensions.


_OWN = [("flame_moe", "flame-moe-tiny", 2)]
_SLOW = [
    ("open_models", "qwen3-30b-a3b", 4),
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


def test_an_annotation_that_does_not_fit_is_kept_alone():
    """The annotated dimension meets the batch; the other parameters are sharded as without it."""
    params = _PARAMS | {"up": ParameterSpec((128, 256), ("ffn", "embed"))}
    found = auto_partition_specs(_network, params, _X, num_shards=4)
    assert found.specs == _COLUMN_ROW | {"up": P("model")}


def test_neighbors_of_an_override_that_is_whole_stay_whole():
    overrides = [("bias", P())]
    found = auto_partition_specs(_network, _PARAMS, _X, num_shards=4, overrides=overrides)
    assert found.specs == {"up": P(), "bias": P(), "down": P(None, "model")}
    assert "[1] the override of bias keeps it whole" in found.report.whole["up"]


@pytest.mark.parametrize(("spec", "fits"), [(P("fsdp", "model"), True), (P(), False)])
def test_an_override_of_an_annotation_must_agree_over_the_axis(spec, fits):
    params = _PARAMS | {"up": ParameterSpec((128, 256), ("embed", "ffn"))}
    shard = lambda *overrides: auto_partition_specs(
        _network, params, _X, num_shards=4, overrides=overrides
    )
    if fits:
        assert shard(("up", spec)).specs == _COLUMN_ROW | {"up": spec}
        return
    with pytest.raises(UserError, match=r"up: .*\(\) contradicts .*'model'"):
        shard(("up", spec))
    with pytest.raises(UserError, match="up and down contradict"):
        shard(("down", spec))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([("head", P("model"))], "'head'"),
        ([("(up", P())], r"'\(up' is no regular expression"),
        ([("up", ("model",))], r"\('up', \('model',\)\)"),
        ({"up": P()}, "{'up': P"),
        ([("bias", P(None, "model"))], r"bias: .* has 2 entries, .* \(256,\)"),
        ([("bias", P("modle"))], "bias: .* unknown mesh axis 'modle'; did you mean 'model'"),
        ([("up", P("fsdp", "fsdp"))], "up: .* axis 'fsdp' twice"),
        ([("odd", P(None, "model"))], "odd: .* size 129 is not divisible by 4"),
        ([("up", P("model"))], "up cannot be sharded along dimension 0"),
        ([("bias", P("model")), ("scale", P("model"))], "bias and scale contradict"),
        ([("up", P(None, "model")), ("bias", P())], "bias and up contradict"),
        ([("bias", P()), ("down", P("model"))], "bias and down contradict"),
    ],
)
def test_overrides_that_do_not_fit_are_refused(overrides, message):
    params = _PARAMS | {"odd": jnp.zeros((128, 129)), "scale": jnp.zeros(128)}
    function = lambda p, x: (_network(p, x) * p["scale"], x @ p["odd"])
    with pytest.raises(UserError, match=message):
        auto_partition_specs(function, params, _X, num_shards=4, overrides=overrides)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_shards": 7}, "num_shards=7"),
        ({"num_shards": 0}, "num_shards=0"),
        ({"num_shards": 2.0}, "num_shards=2.0"),
        ({"fsdp_shards": 0}, "fsdp_shards=0"),
        ({"axis": ""}, "axis=''"),
        ({"axis": "fsdp"}, "axis='fsdp' and fsdp_axis='fsdp'"),
        ({"leftover": "fspd"}, "leftover='fspd'.*'fsdp'"),
        ({"leftover": "error"}, r"leftover='error': 1 parameters.*first odd \(.*size 129"),
    ],
)
def test_invalid_options_are_refused(options, message):
    params = _PARAMS | {"odd": jnp.zeros((128, 129))}
    function = lambda p, x: (_network(p, x), x @ p["odd"])
    with pytest.raises(UserError, match=message):
        auto_partition_specs(function, params, _X, **{"num_shards": 4, **options})


def test_two_parameters_of_one_path_are_refused():
    params = {"a": {"b": jnp.zeros(8)}, "a/b": jnp.zeros(8)}
    with pytest.raises(UserError, match="path 'a/b'"):
        auto_partition_specs(None, params, num_shards=4)


def test_a_parameter_that_an_override_keeps_whole_is_no_leftover():
    found = auto_partition_specs(
        _network, _PARAMS, _X, num_shards=4, overrides=[(".*", P())], leftover="error"
    )
    assert set(found.specs.values()) == {P()}
    assert not found.report.whole
    assert not found.report.classes


def test_shapes_alone_have_leftovers():
    with pytest.raises(UserError, match=r"leftover='error': 1 parameters.*first odd"):
        auto_partition_specs(
            None, _PARAMS | {"odd": jnp.zeros((129, 131))}, num_shards=4, leftover="error"
        )


def test_a_leftover_is_stored_in_parts():
    """A dimension that 4 does not divide stays whole; its storage is sharded along the other."""
    params = {"up": jnp.zeros((128, 257)), "down": jnp.zeros((257, 128))}
    function = lambda p, x: jnp.tanh(x @ p["up"]) @ p["down"] + x
    for leftover, stored in (("replicate", P()), ("fsdp", P("model"))):
        found = auto_partition_specs(function, params, _X, num_shards=4, leftover=leftover)
        assert (found.specs["up"], found.use_specs["up"]) == (stored, P())
        assert "size 257 is not divisible by 4" in found.report.whole["up"]


def test_small_parameters_have_reasons_that_are_not_printed():
    found = auto_partition_specs(
        lambda p, x: x @ p["a"], {"a": jnp.zeros((128, 6))}, _X, num_shards=4
    )
    assert "size 6 is not divisible by 4" in found.report.small["a"]
    assert "whole" not in str(found.report)


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


_MESH = jax.sharding.AbstractMesh(
    (2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2
)
_WHOLE = P()


def _in_shard_map(function, *, manual=("data",), params=_WHOLE):
    return jax.shard_map(
        function,
        mesh=_MESH,
        in_specs=(params, P("data")),
        out_specs=P("data"),
        axis_names=set(manual),
    )


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


def _descend(function):
    """Returns a step of gradient descent."""
    gradient = jax.grad(lambda p, x: jnp.square(function(p, x)).mean())
    return lambda p, x: jax.tree.map(lambda p, g: p - 0.1 * g, p, gradient(p, x))


def _after_conditional_step(function):
    step = _descend(function)
    return lambda p, x: function(jax.lax.cond(x.sum() > 0, step, lambda p, x: p, p, x), x)


def _after_while(function):
    body = lambda x: lambda carry: (carry[0] + 1, _descend(function)(carry[1], x))
    return lambda p, x: function(jax.lax.while_loop(lambda c: c[0] < 3, body(x), (0, p))[1], x)


def _after_scan(function):
    body = lambda x: lambda p, _: (_descend(function)(p, x), None)
    return lambda p, x: function(jax.lax.scan(body(x), p, length=3)[0], x)


@pytest.mark.parametrize(
    "transform",
    [
        jax.jit,
        jax.checkpoint,
        _in_shard_map,
        _in_while,
        _in_cond,
        _in_custom_vjp,
        _after_conditional_step,
        _after_while,
        _after_scan,
    ],
)
def test_functions_inside_others_are_read(transform):
    params = _PARAMS | {"spare": jnp.zeros(7)}
    found = auto_partition_specs(transform(_network), params, _X, num_shards=4)
    assert (found.specs, found.report.unknown) == (_COLUMN_ROW | {"spare": P()}, {})
    if transform is not _after_while:  # JAX 0.11 takes all that a while loop carries for used.
        assert found.report.unused == ("spare",)


def test_parameters_of_each_branch_are_used():
    either = lambda p, x: jax.lax.cond(x.sum() > 0, lambda p: p["up"], lambda p: p["other"], p)
    params = _PARAMS | {"other": jnp.zeros((128, 256))}
    found = auto_partition_specs(
        lambda p, x: _network(p | {"up": either(p, x)}, x), params, _X, num_shards=4
    )
    assert not found.report.unused
    assert found.specs == _COLUMN_ROW | {"other": P(None, "model")}


def test_nested_scans_are_read():
    def outer(x, layers):
        inner = lambda x, p: (x + jax.checkpoint(_network)(p, x), None)
        return jax.lax.scan(inner, x, layers)[0], None

    params = jax.tree.map(lambda x: jnp.zeros((3, 2, *x.shape)), _PARAMS)
    found = auto_partition_specs(
        lambda p, x: jax.lax.scan(outer, x, p)[0].sum(), params, _X, num_shards=2
    )
    assert found.specs == jax.tree.map(lambda spec: P(None, None, *spec), _COLUMN_ROW)


def test_a_shard_map_over_the_axis_decides_itself():
    """Its parameters enter with its own shardings, whole ones included."""
    sharded = lambda params, x: jax.lax.psum(_network(params, x), "model")
    for function, params in ((sharded, _COLUMN_ROW), (_network, _WHOLE)):
        mapped = _in_shard_map(function, manual=("data", "model"), params=params)
        found = auto_partition_specs(mapped, _PARAMS, _X, num_shards=4)
        expected = dict.fromkeys(_PARAMS, _WHOLE) if params is _WHOLE else params
        assert (found.specs, found.report.unknown) == (expected, {})
        assert not found.report.predicted()


def test_errors_of_the_function_keep_their_traceback():
    def broken(params, x):
        raise KeyError("my own error")

    with pytest.raises(KeyError, match="my own error"):
        auto_partition_specs(broken, _PARAMS, _X, num_shards=4)


def test_shapes_alone_give_columns_and_rows():
    found = auto_partition_specs(None, {"a": _PARAMS["up"], "b": _PARAMS["down"]}, num_shards=4)
    assert found.specs == {"a": P(None, "model"), "b": P("model")}


@pytest.mark.parametrize("axis", ["model", "fsdp"])
def test_an_override_in_a_window_is_refused(axis):
    convolve = lambda p, x: jax.lax.conv_general_dilated(x, p["kernel"], (4,), "VALID")
    params, x = {"kernel": jnp.zeros((8, 8, 4))}, jnp.zeros((8, 8, 32))
    with pytest.raises(UserError, match=f"kernel: .*'{axis}'.* shards dimension 2"):
        auto_partition_specs(
            convolve,
            params,
            x,
            num_shards=4,
            fsdp_shards=2,
            overrides=[("kernel", P(None, None, axis))],
        )


def test_shapes_alone_shard_no_square_window():
    params = {"kernel": jnp.zeros((16, 16, 3, 768)), "head": jnp.zeros((768, 1000))}
    found = auto_partition_specs(None, params, num_shards=4, fsdp_shards=2)
    assert found.specs["kernel"] == P(None, None, None, "model")


@pytest.mark.parametrize("given", [P("fsdp"), P(None, ("fsdp", "model"))])
def test_an_override_may_shard_storage(given):
    found = auto_partition_specs(
        _network, _PARAMS, _X, num_shards=4, fsdp_shards=2, overrides=[("up", given)]
    )
    assert found.specs["up"] == given
    assert "fsdp" not in found.use_specs["up"]


def test_a_sum_that_is_scattered_inside_of_a_shard_map_is_a_barrier():
    scatter = lambda p, x: jax.lax.psum_scatter(
        _network(p, x), "data", scatter_dimension=1, tiled=True
    )
    found = auto_partition_specs(_in_shard_map(scatter), _PARAMS, _X, num_shards=4)
    assert found.report.unknown == {"reduce_scatter": 1}


def test_parameters_without_dimensions_stay_whole():
    found = auto_partition_specs(
        lambda p, x: p["scale"] * x, {"scale": jnp.ones(())}, _X, num_shards=4
    )
    assert found.specs == {"scale": P()}
