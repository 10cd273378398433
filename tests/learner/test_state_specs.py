import jax
import jax.numpy as jnp
import optax
import pytest

from moelib.core import tree
from moelib.core.param import FanAxes, ParameterSpec, is_spec
from moelib.learner import optimizers
from moelib.learner.state_specs import state_specs
from tests.learner.example import SCAN_SPECS, SPECS, arrays, ema_config, fn, make_learner

OPTIMIZERS = {
    "sgd": fn(optimizers.sgd_optimizer, learning_rate=0.1, momentum=0.9),
    "adamw": fn(optimizers.adamw_optimizer, learning_rate=0.1),
    "lion": fn(optimizers.lion_optimizer, learning_rate=0.1),
    "adafactor": fn(optimizers.adafactor_optimizer, learning_rate=0.1, min_dim_size_to_factor=4),
    "muon": fn(optimizers.muon_optimizer, learning_rate=0.1),
    "optax.adamw": fn(optax.adamw, learning_rate=0.1),
    "optax.adafactor": fn(optax.adafactor, learning_rate=0.1, min_dim_size_to_factor=4),
    "optax.contrib.muon": fn(optax.contrib.muon, learning_rate=0.1),
    "optax.contrib.schedule_free_adamw": fn(optax.contrib.schedule_free_adamw, learning_rate=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("specs", [SPECS, SCAN_SPECS])
def test_every_array_has_a_spec_of_its_shape(name, specs):
    learner = make_learner(OPTIMIZERS[name], specs, ema=ema_config(0.9))
    got = learner.state_specs()
    shapes = jax.eval_shape(learner.init, arrays(specs))
    assert jax.tree.structure(got, is_leaf=is_spec) == jax.tree.structure(shapes)
    for (path, spec), leaf in zip(tree.flatten_items(got), jax.tree.leaves(shapes), strict=True):
        assert spec.shape == leaf.shape, path
        assert spec.dtype == leaf.dtype.name, path
        if spec.shape == ():
            assert spec.axes == ()


@pytest.mark.parametrize("name", ["sgd", "adamw", "lion", "muon", "optax.adamw"])
def test_moments_are_sharded_like_their_parameters(name):
    learner = make_learner(OPTIMIZERS[name], SCAN_SPECS, ema=ema_config(0.9))
    axes = tree.by_path(jax.tree.map(lambda s: s.axes, SCAN_SPECS, is_leaf=is_spec), is_axes)
    found = 0
    for path, spec in tree.flatten_items(learner.state_specs()):
        owner = [name for name in axes if path.endswith(name)]
        if owner:
            assert spec.axes == axes[owner[0]], path
            found += 1
        else:
            assert set(spec.axes) <= {None}, path
    assert found >= 2 * 4  # Moments and averages of the four parameters that are trained.


def is_axes(value):
    return isinstance(value, tuple)


def factored_axes(optimizer, spec, row="row", col="col"):
    learner = make_learner(optimizer, {"w": spec})
    specs = tree.flatten_items(learner.state_specs())
    return [next(s.axes for p, s in specs if p.endswith(f"/{kind}/w")) for kind in (row, col)]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (SPECS["emb"]["weight"], [("embed",), ("vocab",)]),
        (
            SCAN_SPECS["layers"]["experts"],
            [("layers", "experts", "embed"), ("layers", "experts", "ffn")],
        ),
        (
            ParameterSpec((8, 8), ("in", "out"), "float32", fan_axes=FanAxes((0,), (1,))),
            [("in",), ("out",)],
        ),
        (
            ParameterSpec((8, 8, 8), ("l", "in", "out"), "float32", fan_axes=FanAxes((1,), (2,))),
            [("l", "in"), ("l", "out")],
        ),
    ],
)
def test_rows_and_columns_have_the_axes_that_remain(spec, expected):
    assert factored_axes(OPTIMIZERS["adafactor"], spec) == expected


def test_rows_and_columns_of_optax():
    expected = [("embed",), ("vocab",)]
    spec = SPECS["emb"]["weight"]
    assert factored_axes(OPTIMIZERS["optax.adafactor"], spec, "v_row", "v_col") == expected


def test_reduced_dimensions_that_were_kept_are_not_split():
    state = {"emb": {"weight": jax.ShapeDtypeStruct((16, 1), jnp.float32)}}
    assert state_specs(state, SPECS)["emb"]["weight"].axes == ("vocab", None)


def test_arrays_of_other_shapes_are_not_split():
    state = {"emb": {"weight": jax.ShapeDtypeStruct((3, 5, 7), jnp.float32)}}
    assert state_specs(state, SPECS)["emb"]["weight"].axes == (None, None, None)


def test_large_arrays_of_no_parameter_are_a_warning(caplog):
    flat = optax.flatten(optax.adam(0.1))
    specs = {
        "w": ParameterSpec((40, 30), ("vocab", "embed"), "float32", fan_axes=FanAxes((1,), (0,)))
    }
    make_learner(flat, specs).state_specs()
    record = caplog.records[-1]
    assert record.levelname == "WARNING"
    assert record.args[:2] == (2, "9.6 kB")
    assert "mu float32[1200]" in record.args[2]
    caplog.clear()
    make_learner(OPTIMIZERS["adafactor"], SCAN_SPECS).state_specs()
    make_learner(OPTIMIZERS["muon"], SCAN_SPECS).state_specs()
    assert not caplog.records


def test_nothing_is_allocated():
    huge = ParameterSpec(
        (10**6, 10**6), ("vocab", "embed"), "float32", fan_axes=FanAxes((1,), (0,))
    )
    specs = make_learner(OPTIMIZERS["adamw"], {"w": huge}).state_specs()
    assert tree.count_elements(specs) > 2 * 10**12
