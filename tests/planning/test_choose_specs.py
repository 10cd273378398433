"""The choice of shardings by their compiled collectives."""

import logging

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from moelib.core.errors import UserError
from moelib.core.param import ParameterSpec
from moelib.parallel.auto_sharding import rules
from moelib.planning.choose_specs import Candidate, choose_specs
from moelib.planning.report.step_report import Collective

_MESH = ((1, 8), ("fsdp", "model"))
_PARAMS = {"up": jnp.zeros((128, 512)), "down": jnp.zeros((512, 128))}
_BATCH = (jnp.ones((4, 128)),)


def _loss(params, x):
    return jnp.square(jnp.tanh(x @ params["up"]) @ params["down"]).sum()


def _choose(loss, **options):
    mesh = jax.make_mesh(*_MESH, axis_types=(AxisType.Auto,) * 2)
    return choose_specs(loss, _PARAMS, *_BATCH, mesh=mesh, **options)


def test_the_candidate_that_sends_least_is_chosen():
    """By hand one all-reduce of the output and none of the batch's gradient: 4 x 128 floats."""
    wrong = {"up": P("model"), "down": P("model")}  # Contracts twice.
    choice = _choose(_loss, others={"wrong": wrong})
    by_name = {each.name: each for each in choice.candidates}
    assert choice.best.name == "traced"
    assert choice.best.specs == {"up": P(None, "model"), "down": P("model")}
    sums = [each for each in choice.best.collectives if each.axes == ("model",)]
    assert [each.kind for each in sums] == ["all-reduce"]
    assert 4 * 128 * 4 <= sums[0].bytes <= 4 * 128 * 4 + 8
    assert by_name["wrong"].sent_bytes > choice.best.sent_bytes
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
    mesh = jax.make_mesh(*_MESH, axis_types=(AxisType.Auto,) * 2)
    choice = choose_specs(_loss, params, *_BATCH, mesh=mesh)
    specs = {each.name: each.specs["up"] for each in choice.candidates}
    assert specs == {"traced": P(None, "model"), "shapes": P(None, "model"), "replicated": P()}


def test_a_loss_that_is_no_scalar_is_refused():
    with pytest.raises(UserError, match=r"loss returns \(4, 512\)"):
        _choose(lambda params, x: x @ params["up"])


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (jax.sharding.AbstractMesh((8,), ("model",)), "mesh=AbstractMesh"),
        (((8,), ("fsdp",), AxisType.Auto), "axis='model'.*fsdp"),
        (((8,), ("model",), AxisType.Explicit), r"\('model',\).*Explicit.*AxisType.Auto,\) \* 1"),
    ],
)
def test_a_mesh_that_cannot_be_used_is_refused(mesh, message):
    if isinstance(mesh, tuple):
        mesh = jax.make_mesh(*mesh[:2], axis_types=(mesh[2],))
    with pytest.raises(UserError, match=message):
        choose_specs(_loss, _PARAMS, *_BATCH, mesh=mesh)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ([P()], r"others=\[P\(\)\]"),
        ({"traced": {"up": P(), "down": P()}}, r"others\['traced'\]"),
        ({"own": {"up": P()}}, r"others\['own'\] must be a tree like params"),
        ({"own": {"up": P(), "down": "model"}}, r"others\['own'\].*a PartitionSpec for each"),
        ({"own": {"up": P(), "down": P("modle")}}, r"others\['own'\]: down: .*'modle'.*'model'"),
    ],
)
def test_candidates_that_do_not_fit_are_refused(others, message):
    with pytest.raises(UserError, match=message):
        _choose(_loss, others=others)


def test_no_candidate_shards_the_window_of_a_convolution():
    convolve = lambda w, x: jax.lax.conv_general_dilated(
        x, w, (16,), "VALID", dimension_numbers=("NWC", "OIW", "NWC")
    )
    mesh, shape = jax.make_mesh(*_MESH, axis_types=(AxisType.Auto,) * 2), jax.ShapeDtypeStruct
    choose = lambda **others: choose_specs(
        lambda w, x: jnp.square(convolve(w, x)).sum(),
        shape((512, 4, 16), "float32"),
        shape((4, 64, 4), "float32"),
        mesh=mesh,
        others=others,
    )
    assert [each.name for each in choose().candidates] == ["traced", "replicated"]
    with pytest.raises(UserError, match=r"others\['own'\]: .*dimension 2"):
        choose(own=P(None, None, "model"))
