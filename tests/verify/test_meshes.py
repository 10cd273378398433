"""Meshes that a config is verified on."""

import itertools

import pytest

from moelib.parallel.mesh import HybridMeshShape, describe_mesh, mesh_shape_from_axes
from moelib.train.trainer import SpmdTrainer
from moelib.verify.meshes import meshes_to_check
from tests.verify.planted import BrokenRule


def config(**fields):
    return SpmdTrainer.default_config().set(**fields)


def test_all_are_every_way_to_split_eight_devices_over_five_axes():
    found = meshes_to_check(config(), 8, "all")
    assert len(found) == 35  # 3 halvings over 5 axes: C(7, 3).
    assert len({tuple(axes.items()) for axes in found}) == 35


@pytest.mark.parametrize(("thorough", "num_triples"), [(False, 4), (True, 10)])
def test_auto_has_each_axis_alone_all_pairs_and_the_configs_own_first(thorough, num_triples):
    cfg = config(mesh_shape=mesh_shape_from_axes(fsdp=-1, expert=2))
    found = meshes_to_check(cfg, 8, thorough=thorough)
    assert found[:2] == [{"expert": 2, "fsdp": 4}, {"expert": 4, "fsdp": 2}]
    assert sum(len(axes) == 1 for axes in found) == 5
    assert sum(len(axes) == 3 for axes in found) == num_triples
    assert len(found) == 7 + num_triples
    assert len({pair for axes in found for pair in itertools.combinations(axes, 2)}) == 10


def test_mesh_rules_over_slices_count_as_the_configs_own():
    shape = HybridMeshShape(ici=mesh_shape_from_axes(model=4), dcn=mesh_shape_from_axes(data=-1))
    cfg = config(mesh_rules=[("gpu-.*", shape)])
    assert {"data": 2, "model": 4} in meshes_to_check(cfg, 8)
    assert {"data": 2, "model": 4} not in meshes_to_check(config(), 8)


def test_a_mesh_that_is_named_twice_is_tried_once():
    assert meshes_to_check(config(), 8, "fsdp=8;data=2,model=4;fsdp=8") == [
        {"fsdp": 8},
        {"data": 2, "model": 4},
    ]


def test_a_mesh_rule_that_raises_is_left_to_the_checks():
    broken = config(mesh_rules=[("gpu-.*", BrokenRule.default_config())])
    assert meshes_to_check(broken, 8) == meshes_to_check(config(), 8)


def test_an_axis_that_splits_nothing_is_excluded():
    cfg = config(sharding_rules={"sequence": (), "residual_sequence": ()})
    assert not any("seq" in axes for axes in meshes_to_check(cfg, 8, "all"))


def test_a_list_is_used_unchanged():
    found = meshes_to_check(config(), 8, "fsdp=8; model=4,data=2")
    assert found == [{"fsdp": 8}, {"data": 2, "model": 4}]
    assert describe_mesh(found[1]) == "data=2,model=4"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fdsp=8", r"'fdsp'.*'fsdp'"),
        ("fsdp=4", r"4 devices.*8"),
        ("fsdp=x", "'fsdp=x'"),
        ("pipeline=8", "axis 'pipeline'"),
    ],
)
def test_an_impossible_mesh_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        meshes_to_check(config(), 8, text)
