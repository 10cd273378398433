"""Faults planted in a user's layers, which lint must find in the step that is compiled of them."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from moelib.core.config import config_for_function
from moelib.layers.remat import remat
from moelib.parallel.mesh import create_device_mesh, mesh_shape_from_axes
from moelib.planning.compiled.compile_step import no_compilation_cache
from moelib.planning.hardware.topologies import topology
from moelib.planning.hlo import program as hlo
from moelib.planning.hlo.source import SourceMap
from moelib.planning.lint.compute import remats_that_save_nothing
from moelib.planning.lint.facts import Facts, StateArray, Thresholds, facts_of
from moelib.planning.lint.rules import lint
from tests.planning import planted

# Of a small model: one sequence's activations, and a matrix.
SMALL = Thresholds(activation=2**15, collective=2**12, state=2**14, copy=2**30, padded=2**30)
EMPTY = hlo.parse("ENTRY %main (a: f32[8]) -> f32[8] {\n  ROOT %a = f32[8]{0} parameter(0)\n}\n")


def _findings(trainer):
    """Returns {rule: finding} of a trainer's step, compiled."""
    with no_compilation_cache():
        text = trainer.compile_train_step().as_text()
    found = lint(
        hlo.parse(text),
        facts_of(trainer),
        source_map=SourceMap(text),
        thresholds=SMALL,
        traced=trainer.trace_train_step(),
    )
    return {each.rule: each for each in found}


def _on_cpu(tmp_path, layer, **changes):
    return _findings(planted.trainer(tmp_path, layer, jax.devices()[:8], **changes))


@pytest.mark.slow
def test_a_sound_layer_is_left_alone(tmp_path):
    assert _on_cpu(tmp_path, planted.Sound) == {}


def test_an_unsplit_temporary_is_found_at_its_layer_and_its_line(tmp_path):
    finding = _on_cpu(tmp_path, planted.Unsplit)["unsplit activation"]
    assert finding.config_path == "model.layer"
    assert finding.bytes == 16 * 16 * planted.DIM * 4  # The rows of all devices.
    assert any("planted.py" in each for each in finding.locations)


def test_a_dense_ragged_dot_is_found(tmp_path):
    trainer = planted.trainer(tmp_path, planted.Dense, jax.devices()[:8])
    found = lint(EMPTY, facts_of(trainer), traced=trainer.trace_train_step())
    assert {(each.rule, each.config_path) for each in found} == {
        ("dense grouped matmul", "model.layer")
    }
    assert "up to 4 times the work" in found[0].advice


@pytest.mark.slow
def test_experts_whose_weights_are_gathered_are_found(tmp_path):
    finding = _on_cpu(tmp_path, planted.GathersExperts)["all-gather for all-to-all"]
    assert "weights of all experts" in finding.advice
    assert finding.config_path == "model.layer"


@pytest.mark.slow
def test_experts_that_gather_all_tokens_are_found(tmp_path):
    finding = _on_cpu(tmp_path, planted.GathersTokens)["all-gather for all-to-all"]
    assert "tokens of all devices" in finding.advice


def test_state_that_nothing_splits_is_found(tmp_path):
    devices = jax.devices()[:8]
    whole = planted.trainer(tmp_path, planted.Sound, devices, mesh_shape=(1, 8, 1, 1, 1, 1))
    found = lint(EMPTY, facts_of(whole), thresholds=SMALL)
    assert {each.config_path for each in found} == {"sharding_rules"}
    paths = [each.instruction.partition(" ")[0] for each in found]
    assert "model/layer/weight" in paths
    assert len(paths) == 3
    split = planted.trainer(tmp_path, planted.Sound, devices)
    assert lint(EMPTY, facts_of(split), thresholds=SMALL) == []


def _no_such_point(prevent_cse: bool = False):
    policy = jax.checkpoint_policies.save_only_these_names("no_such_point")
    return lambda fn: jax.checkpoint(fn, policy=policy, prevent_cse=prevent_cse)


def _trainer_with_remat(tmp_path, wrapper):
    from experiments import flame_moe

    cfg = flame_moe.tiny()
    cfg.set(dir=str(tmp_path), mesh_shape=(1, 1, 1, 1, 1, 1))
    cfg.model.decoder.set(num_layers=2, remat=wrapper)
    return cfg.instantiate(parent=None, devices=jax.devices()[:1])


@pytest.mark.parametrize(
    ("wrapper", "count"),
    [
        (config_for_function(_no_such_point), 1),
        (config_for_function(remat).set(policy="dots_saveable"), 0),
        (config_for_function(remat).set(keep=["experts_down"]), 0),
        (config_for_function(remat), 0),  # It is meant to keep nothing.
    ],
)
def test_a_remat_policy_that_matches_nothing_is_found(tmp_path, wrapper, count):
    found = remats_that_save_nothing(_trainer_with_remat(tmp_path, wrapper))
    assert [each.config_path for each in found] == ["model.decoder.remat"] * count


def test_a_weight_that_each_turn_gathers_again_in_float32_is_found_in_a_tpus_program():
    pytest.importorskip("libtpu")
    mesh = create_device_mesh(mesh_shape_from_axes(fsdp=4), devices=topology("v6e:2x2x1").devices)

    @functools.partial(
        jax.shard_map, in_specs=(PartitionSpec("fsdp"),) * 2, out_specs=PartitionSpec("fsdp")
    )
    def step(weight, x):
        def turn(x, _):
            whole = jax.lax.all_gather(weight, "fsdp", tiled=True)
            return jnp.tanh(x @ (whole * x[0, 0].astype(jnp.float32)).astype(x.dtype)), None

        return jax.lax.scan(turn, x, length=6)[0]

    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    weight = jax.ShapeDtypeStruct((2048, 2048), jnp.float32, sharding=sharding)
    x = jax.ShapeDtypeStruct((512, 2048), jnp.bfloat16, sharding=sharding)
    with jax.set_mesh(mesh), no_compilation_cache():
        text = jax.jit(step).lower(weight, x).compile().as_text()
    state = StateArray("model/weight", (2048, 2048), ("embed", None), 2**22, split=True, cast=True)
    facts = Facts(dict(mesh.shape), train_dtype="bfloat16", state=(state,))
    found = {each.rule: each for each in lint(hlo.parse(text), facts, source_map=SourceMap(text))}
    gather = found["float32 gather of weights"]
    assert (gather.executions, gather.bytes) == (6, 2048 * 2048 * 4)
    assert gather.locations[0].startswith("lint/test_planted.py")
