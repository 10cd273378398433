"""Meshes: sizes are inferred and checked, and hybrid ones keep slices together."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from moelib.parallel.mesh import (
    MESH_AXIS_NAMES,
    HybridMeshShape,
    create_device_mesh,
    describe_mesh,
    infer_mesh_shape,
    mesh_shape_from_axes,
)


def test_one_size_is_inferred():
    shape = mesh_shape_from_axes(data=-1, fsdp=2, model=2)
    assert infer_mesh_shape(shape, 8) == (1, 2, 1, 2, 1, 2)


def test_mesh_has_all_axes_and_auto_types():
    mesh = create_device_mesh(mesh_shape_from_axes(data=2, fsdp=-1))
    assert dict(mesh.shape) == dict(zip(MESH_AXIS_NAMES, (1, 2, 1, 4, 1, 1), strict=True))
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_fewer_devices_can_be_given():
    assert create_device_mesh((-1,), ("data",), jax.devices()[:4]).size == 4


def test_too_small_a_mesh_names_both_numbers_and_what_fits():
    with pytest.raises(
        ValueError, match=r"data 3.* takes 3 devices, but there are 8.*data 8 would"
    ):
        create_device_mesh(mesh_shape_from_axes(data=3))


def test_known_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"multiply to 3, which does not divide the 8.*1, 2, 4, 8"):
        create_device_mesh(mesh_shape_from_axes(data=-1, fsdp=3))


@pytest.mark.parametrize("shape", [(-1, -1), (0, 8)])
def test_sizes_that_mean_nothing_are_refused(shape):
    with pytest.raises(ValueError, match="at most one may be -1"):
        infer_mesh_shape(shape, 8)


def test_as_many_sizes_as_axes():
    with pytest.raises(ValueError, match="2 sizes for the 1 axes data"):
        create_device_mesh((2, 4), ("data",))


def test_hybrid_mesh_keeps_slices_together():
    hybrid = HybridMeshShape(ici=(-1, 2), dcn=(2, 1))
    mesh = create_device_mesh(hybrid, ("data", "model"))
    ids = np.vectorize(lambda device: device.id)(mesh.devices)
    assert ids.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    inner = create_device_mesh(HybridMeshShape(ici=(2, 2), dcn=(1, 2)), ("data", "model"))
    ids = np.vectorize(lambda device: device.id)(inner.devices)
    assert ids.tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_hybrid_mesh_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="takes 3 slices, which does not divide the 8 devices"):
        create_device_mesh(HybridMeshShape(ici=(-1,), dcn=(3,)), ("data",))


def test_description_leaves_out_axes_of_one():
    assert describe_mesh((1, 4, 1), ("pipeline", "data", "model")) == "data 4"
    assert describe_mesh((1,), ("data",)) == "1 device"
