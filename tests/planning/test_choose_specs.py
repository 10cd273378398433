"""The choice of shardings by their compiled collectives."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from moelib.core.errors import UserError
from moelib.core.param import ParameterSpec
from moelib.parallel.auto_sharding import rules
from moelib.planning.choose_specs import Candidate, choose_specs, compile_candidate
from moelib.planning.report.step_report import Collective

_MESH = ((1, 8), ("fsdp", "model"))
_PARAMS = {"up": np.zeros((128, 512), np.float32), "down": np.zeros((512, 128), np.float32)}
_BATCH = (np.ones((4, 128), np.float32),)


def _loss(params, x):
    return jnp.square(jnp.tanh(x @ params["up"]) @ params["down"]).sum()


def _mesh(shape, names, axis_type=AxisType.Auto):
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(names))


def _choose(loss, mesh=_MESH, params=_PARAMS, **options):
    mesh = _mesh(*mesh) if isinstance(mesh, tuple) else mesh
    return choose_specs(loss, params, *_BATCH, mesh=mesh, **options)


def test_the_candidate_that_sends_least_is_chosen():
    """By hand one all-reduce of the output and none of the batch's gradient: 4 x 128 floats."""
    choice = _choose(_loss)
    by_name = {each.name: each for each in choice.candidates}
    assert choice.best.name == "traced"
    assert choice.best.specs == {"up": P(None, "model"), "down": P("model")}
    sums = [each for each in choice.best.collectives if each.axes == ("model",)]
    assert [each.kind for each in sums] == ["all-reduce"]
    assert 4 * 128 * 4 <= sums[0].bytes <= 4 * 128 * 4 + 8
    specs = {"up": P("model"), "down": P("model")}  # Contracts twice.
    wrong = compile_candidate("wrong", _loss, _PARAMS, *_BATCH, mesh=_mesh(*_MESH), specs=specs)
    assert wrong.sent_bytes > choice.best.sent_bytes
    assert wrong.cost > choice.best.cost
    assert by_name["replicated"].cost > choice.best.cost
    assert by_name["replicated"].flops == 8 * choice.best.flops > 0


def test_a_step_that_sends_more_than_predicted_is_warned_of(caplog, monkeypatch):
    """A wrong rule says that a sort along the hidden dimension is elementwise."""
    mixed = jax.jit(lambda x: jnp.sort(x, axis=1))

    def loss(params, x):
        return jnp.square(mixed(jnp.tanh(x @ params["up"])) @ params["down"]).sum()

    monkeypatch.setattr(rules, "_registered", {})
    with caplog.at_level(logging.WARNING):
        _choose(_loss)
        assert not caplog.text
        rules.register_dimension_rule("jit:<lambda>", "m f -> m f")
        _choose(loss)
    assert "over the axis model" in caplog.text


def test_a_few_bytes_of_parameters_are_not_worth_another_collective():
    few, many = (
        Candidate("", {}, (Collective("all-gather", ("model",), 8, executions=n),), 1e6, held, 0)
        for n, held in ((2, 2e6), (3, 2e6 - 1e4))
    )
    assert few.cost < many.cost


def test_matmuls_that_are_not_sharded_cost():
    small, large = (Candidate("", {}, (), 0.0, 1e6, flops) for flops in (1e12, 8e12))
    assert large.cost - small.cost == pytest.approx(7e9)


def test_logical_axes_shard_the_candidates():
    params = _PARAMS | {"up": ParameterSpec((128, 512), ("embed", "ffn"))}
    choice = _choose(_loss, params=params)
    specs = {each.name: each.specs["up"] for each in choice.candidates}
    assert specs == {"traced": P(None, "model"), "shapes": P(None, "model"), "replicated": P()}


def _vector(params, x):
    return x @ params["up"]


@pytest.mark.parametrize(
    ("loss", "mesh", "message"),
    [
        (_vector, _MESH, r"\(4, 512\)"),
        (_loss, jax.sharding.AbstractMesh((8,), ("model",)), "mesh=AbstractMesh"),
        (_loss, ((8,), ("fsdp",)), "axis='model'.*fsdp"),
        (_loss, ((8,), ("model",), AxisType.Explicit), "Explicit.*AxisType.Auto"),
    ],
)
def test_what_cannot_be_compared_is_refused(loss, mesh, message):
    with pytest.raises(UserError, match=message):
        _choose(loss, mesh)


def test_no_candidate_shards_the_window_of_a_convolution():
    convolve = lambda w, x: jax.lax.conv_general_dilated(
        x, w, (16,), "VALID", dimension_numbers=("NWC", "OIW", "NWC")
    )
    mesh, shape = jax.make_mesh(*_MESH, axis_types=(AxisType.Auto,) * 2), jax.ShapeDtypeStruct
    choice = choose_specs(
        lambda w, x: jnp.square(convolve(w, x)).sum(),
        shape((512, 4, 16), "float32"),
        shape((4, 64, 4), "float32"),
        mesh=mesh,
    )
    assert [each.name for each in choice.candidates] == ["traced", "replicated"]
