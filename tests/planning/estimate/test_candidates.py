"""Candidates are what the trainer takes, no more and no less."""

import dataclasses
import itertools
import math

import jax
import pytest

from moelib.core.errors import UserError
from moelib.parallel.mesh import MESH_AXIS_NAMES, HybridMeshShape
from moelib.planning.estimate.activations import FULL, OWN
from moelib.planning.estimate.candidates import candidates, current_candidate, rules_of
from moelib.planning.hardware.topologies import describe
from tests.planning import tiny_moe


@pytest.fixture(scope="module")
def tiny():
    return tiny_moe.config(), tiny_moe.workload()


def _accepted(cfg, shape):
    """Returns whether the trainer itself accepts a mesh."""
    try:
        trainer = cfg.clone(mesh_shape=shape).instantiate(parent=None)
        trainer.batch_sharding  # noqa: B018
        trainer.trainer_state_shardings  # noqa: B018
    except ValueError:
        return False
    return True


@pytest.mark.slow
def test_meshes_are_those_that_the_trainer_accepts(tiny):
    cfg, work = tiny
    shapes = [
        (1, *sizes)
        for sizes in itertools.product((1, 2, 4, 8), repeat=5)
        if math.prod(sizes) == len(jax.devices())
    ]
    # Attention's ring and logits split twice are refused when the step is traced, not before.
    wanted = {shape for shape in shapes if _accepted(cfg, shape)}
    found = [*candidates(cfg, work, describe("h100:1x8"))]
    assert {each.apply(cfg).mesh_shape for each in found} == wanted
    assert 1 < len(wanted) < len(shapes)


def test_meshes_are_legal_for_the_trainer(tiny):
    cfg, work = tiny
    meshes = {each.apply(cfg).mesh_shape for each in candidates(cfg, work, describe("h100:1x8"))}
    assert all(_accepted(cfg, shape) for shape in sorted(meshes)[::8])
    sizes = (1, 1, 1, 1, 1, 8)  # More than there are heads.
    assert sizes not in meshes
    assert not _accepted(cfg, sizes)


def test_a_candidate_changes_mesh_parts_and_remat_alone(tiny):
    cfg, work = tiny
    found = [*candidates(cfg, work, describe("h100:1x8"))]
    for each in found:
        rows = (
            each.batch_per_device
            * each.num_microbatches
            * each.mesh.parts(("data", "expert", "fsdp"))
        )
        assert rows == cfg.input.global_batch_size
    full = next(each for each in found if each.remat == FULL).apply(cfg)
    assert full.model.decoder.remat.policy is None
    assert full.input == cfg.input
    assert full.model.set(decoder=cfg.model.decoder) == cfg.model


def test_slices_take_a_hybrid_mesh(tiny):
    cfg, work = tiny
    found = [*candidates(cfg, work, describe("h100:2x4"))]
    shapes = {each.apply(cfg).mesh_shape for each in found}
    assert all(isinstance(shape, HybridMeshShape) for shape in shapes)
    assert all(math.prod(shape.dcn) == 2 and math.prod(shape.ici) == 4 for shape in shapes)
    across = {MESH_AXIS_NAMES[shape.dcn.index(2)] for shape in shapes}
    assert across == {"data", "expert", "fsdp"}


def test_on_gpus_one_axis_at_most_is_within_slices_and_across(tiny):
    cfg, work = tiny
    work = dataclasses.replace(work, global_batch_size=16)
    both = lambda mesh: sum(axis in mesh.inside for axis in mesh.across)
    found = {each.mesh for each in candidates(cfg, work, describe("h100:4x4"))}
    assert {both(mesh) for mesh in found} == {0, 1}
    tpus = {each.mesh for each in candidates(cfg, work, describe("4*v6e:2x2"))}
    assert {both(mesh) for mesh in tpus} == {0, 1, 2}


def test_rows_at_a_time_are_all_divisors(tiny):
    cfg, work = tiny
    work = dataclasses.replace(work, global_batch_size=6)
    found = [*candidates(cfg, work, describe("h100:1x2"), mesh="fsdp=2")]
    assert {(each.batch_per_device, each.num_microbatches) for each in found} == {(1, 3), (3, 1)}


def test_a_mesh_can_be_given(tiny):
    cfg, work = tiny
    found = [*candidates(cfg, work, describe("h100:1x8"), mesh="fsdp=2,expert=-1")]
    assert {each.mesh for each in found} == {found[0].mesh}
    assert found[0].mesh.sizes == {"expert": 4, "fsdp": 2}


@pytest.mark.parametrize(
    ("topology", "mesh", "names"),
    [
        ("h100:1x8", "fsdp=3", ("fsdp=3", "8")),
        ("h100:1x8", "fdsp=8", ("'fdsp'", "'fsdp'")),
        ("h100:1x8", "fsdp:8", ("'fsdp:8'", "axis=size")),
        ("h100:1x8", "model=8", ("model=8",)),
        ("h100:1x3", None, ("h100:1x3", "(model=3)", "(seq=3)", "(fsdp=3)", "(expert=3)")),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(tiny, topology, mesh, names):
    cfg, work = tiny
    with pytest.raises(UserError) as error:
        [*candidates(cfg, work, describe(topology), mesh=mesh)]
    assert all(name in str(error.value) for name in names)


@pytest.mark.parametrize(
    ("rules", "message"),
    [({"fnn": ("model",)}, r"'fnn'.*'ffn'"), ({"ffn": ("modle",)}, r"'modle'.*'model'")],
)
def test_sharding_rules_that_the_trainer_refuses_are_refused(tiny, rules, message):
    with pytest.raises(UserError, match=message):
        rules_of(tiny[0].clone(sharding_rules=rules))


def test_current_candidate_takes_mesh_and_parts_of_the_config(tiny):
    cfg, work = tiny
    cfg = cfg.clone(mesh_shape=(1, 1, 2, -1, 1, 1))
    each = current_candidate(cfg, work, describe("h100:1x8"))
    assert each.mesh.sizes == {"expert": 2, "fsdp": 4}
    assert (each.num_microbatches, each.remat) == (cfg.num_microbatches, OWN)
    assert each.apply(cfg).model == cfg.model
    with pytest.raises(UserError, match=r"2 slices.*HybridMeshShape"):
        current_candidate(cfg, work, describe("h100:2x4"))


def test_sharding_rules_may_name_the_configs_own_mesh_axes(tiny):
    names = (*MESH_AXIS_NAMES, "rings")
    cfg = tiny[0].clone(mesh_axis_names=names, sharding_rules={"ffn": ("rings",)})
    assert rules_of(cfg)["ffn"] == ("rings",)
    assert rules_of(cfg)["batch"] == ("data", "expert", "fsdp")


@pytest.mark.parametrize("topology", ["v5p:1x1x1", "2*V6E:1x1"])
def test_slices_of_one_device_have_a_mesh(tiny, topology):
    cfg, work = tiny
    found = [*candidates(cfg, work, describe(topology))]
    assert {tuple(each.shared_sides()) for each in found} == {()}


def test_a_chunk_of_the_loss_larger_than_a_micro_batch_is_refused_as_by_the_trainer(tiny):
    cfg, work = tiny
    two, one = describe("h100:1x2"), describe("h100:1x1")
    tokens = work.seq_len * 4  # Of 8 sequences.
    chunks_of = lambda size: dataclasses.replace(work, loss_chunk_size=size)
    found = [*candidates(cfg, chunks_of(tokens), two, mesh="fsdp=2")]
    assert {each.batch_per_device for each in found} == {4}
    message = f"loss_chunk_size is {tokens + 1}.*{tokens} tokens"
    with pytest.raises(UserError, match=message):
        [*candidates(cfg, chunks_of(tokens + 1), two, mesh="fsdp=2")]
    with pytest.raises(UserError, match=message):
        current_candidate(cfg.clone(mesh_shape=(1, 1, 1, 2, 1, 1)), chunks_of(tokens + 1), two)
    with pytest.raises(UserError, match=f"loss_chunk_size.*{2 * tokens} tokens"):
        [*candidates(cfg, chunks_of(2 * tokens + 1), one)]
