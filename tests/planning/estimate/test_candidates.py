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
    found = candidates(cfg, work, describe("h100:1x8"))
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
    found = candidates(cfg, work, describe("h100:1x8"))
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
    found = candidates(cfg, work, describe("h100:2x4"))
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
    found = candidates(cfg, work, describe("h100:1x2"), mesh="fsdp=2")
    assert {(each.batch_per_device, each.num_microbatches) for each in found} == {(1, 3), (3, 1)}


def test_a_mesh_can_be_given(tiny):
    cfg, work = tiny
    found = candidates(cfg, work, describe("h100:1x8"), mesh="fsdp=2,expert=-1")
    assert {each.mesh for each in found} == {found[0].mesh}
    assert found[0].mesh.sizes == {"expert": 4, "fsdp": 2}


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("fsdp=3", r"fsdp=3.*3 devices.*8"),
        ("fdsp=8", r"'fdsp'.*'fsdp'"),
        ("fsdp:8", r"'fsdp:8'.*axis=size"),
        ("model=8", r"8 devices.*model=8"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(tiny, mesh, message):
    cfg, work = tiny
    with pytest.raises(UserError, match=message):
        candidates(cfg, work, describe("h100:1x8"), mesh=mesh)


def test_current_candidate_takes_mesh_and_parts_of_the_config(tiny):
    cfg, work = tiny
    cfg = cfg.clone(mesh_shape=(1, 1, 2, -1, 1, 1))
    each = current_candidate(cfg, work, describe("h100:1x8"))
    assert each.mesh.sizes == {"expert": 2, "fsdp": 4}
    assert (each.num_microbatches, each.remat) == (cfg.num_microbatches, OWN)
    assert each.apply(cfg).model == cfg.model
    with pytest.raises(UserError, match=r"2 slices.*HybridMeshShape"):
        current_candidate(cfg, work, describe("h100:2x4"))


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"fnn": ("model",)}, r"'fnn'.*'ffn'"),
        ({"ffn": ("modle",)}, r"'modle'.*'model'"),
    ],
)
def test_sharding_rules_that_the_trainer_refuses_are_refused(tiny, rules, message):
    with pytest.raises(UserError, match=message):
        rules_of(tiny[0].clone(sharding_rules=rules))


def test_sharding_rules_may_name_the_configs_own_mesh_axes(tiny):
    names = (*MESH_AXIS_NAMES, "rings")
    cfg = tiny[0].clone(mesh_axis_names=names, sharding_rules={"ffn": ("rings",)})
    assert rules_of(cfg)["ffn"] == ("rings",)
    assert rules_of(cfg)["batch"] == ("data", "expert", "fsdp")


def test_a_topology_without_a_mesh_names_every_axis_that_cannot_split(tiny):
    cfg, work = tiny
    with pytest.raises(UserError, match="h100:1x3: no mesh of its 3 devices") as error:
        candidates(cfg, work, describe("h100:1x3"))
    for axis in ("model", "seq", "fsdp", "expert"):
        assert f"({axis}=3)" in str(error.value)


@pytest.mark.parametrize("topology", ["v5e:1x1", "v6e:1x1", "v5p:1x1x1", "2*V6E:1x1"])
def test_slices_of_one_device_have_a_mesh(tiny, topology):
    cfg, work = tiny
    found = candidates(cfg, work, describe(topology))
    assert found
    assert {tuple(each.shared_sides()) for each in found} == {()}


def test_a_chunk_of_the_loss_larger_than_a_micro_batch_is_refused_as_by_the_trainer(tiny):
    cfg, work = tiny
    tokens = work.seq_len * 4
    work = dataclasses.replace(work, loss_chunk_size=tokens)
    found = candidates(cfg, work, describe("h100:1x2"), mesh="fsdp=2")
    assert {each.batch_per_device for each in found} == {4}  # Of 8 sequences.
    work = dataclasses.replace(work, loss_chunk_size=tokens + 1)
    message = f"loss_chunk_size is {tokens + 1}.*{tokens} tokens"
    with pytest.raises(UserError, match=message):
        candidates(cfg, work, describe("h100:1x2"), mesh="fsdp=2")
    most = work.seq_len * 8  # Of one device.
    work = dataclasses.replace(work, loss_chunk_size=most + 1)
    with pytest.raises(UserError, match=f"can run the config: .*loss_chunk_size.*{most} tokens"):
        candidates(cfg, work, describe("h100:1x1"))
    work = dataclasses.replace(work, loss_chunk_size=tokens + 1)
    with pytest.raises(UserError, match=message):
        current_candidate(cfg.clone(mesh_shape=(1, 1, 1, 2, 1, 1)), work, describe("h100:1x2"))
