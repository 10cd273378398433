"""Meshes: text, inferred sizes, and slices that stay contiguous."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from moelib.core.errors import UserError
from moelib.parallel.mesh import (
    MESH_AXIS_NAMES,
    HybridMeshShape,
    _hybrid_devices,
    all_meshes,
    create_device_mesh,
    describe_mesh,
    infer_mesh_shape,
    mesh_shape_from_axes,
    parse_mesh,
    slices,
)
from moelib.planning.hardware.topologies import describe, torus_devices
from tests.parallel.slices import two_slices


def test_one_size_is_inferred():
    shape = mesh_shape_from_axes(data=-1, fsdp=2, model=2)
    assert infer_mesh_shape(shape, 8) == (1, 2, 1, 2, 1, 2)


def test_mesh_has_all_axes_and_auto_types():
    mesh = create_device_mesh(mesh_shape_from_axes(data=2, fsdp=-1))
    assert dict(mesh.shape) == dict(zip(MESH_AXIS_NAMES, (1, 2, 1, 4, 1, 1), strict=True))
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_fewer_devices_can_be_given():
    assert create_device_mesh((-1,), ("data",), jax.devices()[:4]).size == 4


def test_hybrid_mesh_keeps_slices_together():
    hybrid = HybridMeshShape(ici=(-1, 2), dcn=(2, 1))
    mesh = create_device_mesh(hybrid, ("data", "model"))
    ids = np.vectorize(lambda device: device.id)(mesh.devices)
    assert ids.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    inner = create_device_mesh(HybridMeshShape(ici=(2, 2), dcn=(1, 2)), ("data", "model"))
    ids = np.vectorize(lambda device: device.id)(inner.devices)
    assert ids.tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]


@dataclasses.dataclass(frozen=True)
class ProcessDevice:
    """A device that reports its process, but no slice."""

    id: int
    process_index: int


@dataclasses.dataclass(frozen=True)
class SliceDevice(ProcessDevice):
    """A device of a slice, which may have several processes."""

    slice_index: int
    device_kind: str = "fake"
    platform: str = "fake"
    local_hardware_id: int | None = 0


def on_processes(num_processes, num_devices):
    """Devices in an order that mixes processes."""
    return [ProcessDevice(i, i % num_processes) for i in range(num_devices)]


def on_slices(*sizes):
    """Devices of slices of these sizes, two to a process, in an order that mixes slices."""
    slices = [s for s, size in enumerate(sizes) for _ in range(size)]
    devices = [SliceDevice(i, i // 2, s) for i, s in enumerate(slices)]
    return devices[::2] + devices[1::2]


def attributes(mesh_devices, name):
    return np.vectorize(lambda device: getattr(device, name))(mesh_devices)


@pytest.mark.parametrize(("data", "fsdp"), [(2, 1), (1, 2)])
def test_outer_sizes_lie_across_slices_and_inner_ones_within(data, fsdp):
    hybrid = HybridMeshShape(ici=(1, 1, 2, 2, 1, 1), dcn=(1, data, 1, fsdp, 1, 1))
    found = attributes(_hybrid_devices(hybrid, MESH_AXIS_NAMES, on_slices(4, 4)), "slice_index")
    assert found.shape == (1, data, 2, 2 * fsdp, 1, 1)
    if data == 2:  # The index along data is the slice.
        assert (found == np.arange(2)[:, None, None, None, None]).all()
    else:  # Along fsdp, the devices of the first slice come first.
        assert (found == np.array([0, 0, 1, 1])[:, None, None]).all()


@pytest.mark.parametrize("num_processes", [2, 4])
def test_devices_without_slices_are_divided_by_process(num_processes):
    hybrid = HybridMeshShape(ici=(-1, 2), dcn=(2, 1))
    found = _hybrid_devices(hybrid, ("data", "model"), on_processes(num_processes, 8))
    processes = attributes(found, "process_index").reshape(2, -1)  # One row per slice.
    half = num_processes // 2
    assert [set(row) for row in processes.tolist()] == [
        set(range(half)),
        set(range(half, num_processes)),
    ]
    assert len(set(attributes(found, "id").flat)) == 8


@pytest.mark.parametrize("described", [False, True])
def test_axes_across_hosts_of_gpus_come_first(described):
    hosts = [0] * 4 + [1] * 4
    devices = [
        SliceDevice(i, host, 0 if described else host, "H100", "gpu", None if described else i % 4)
        for i, host in enumerate(hosts)
    ]
    hybrid = HybridMeshShape(ici=(4, 1), dcn=(1, 2))
    mesh = create_device_mesh(hybrid, ("expert", "fsdp"), devices)
    assert dict(mesh.shape) == {"fsdp": 2, "expert": 4}
    assert attributes(mesh.devices, "id").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(UserError, match="2 slices"):
        create_device_mesh((8, 1), ("expert", "fsdp"), devices)


def _gpus(hosts):
    return [SliceDevice(i, i // 8, 0, "H100", "gpu", None) for i in range(8 * hosts)]


@pytest.mark.parametrize(
    ("ici", "dcn"),
    [((8, 1), (2, 2)), ((1, 8), (2, 2)), ((4, 2), (1, 4)), ((2, 4), (4, 1)), ((8, 1), (1, 4))],
)
def test_hosts_of_gpus_are_never_interleaved(ici, dcn):
    mesh = create_device_mesh(HybridMeshShape(ici, dcn), ("data", "expert"), _gpus(4))
    hosts = attributes(mesh.devices, "process_index").reshape(4, 8)
    assert [len(set(row)) for row in hosts.tolist()] == [1] * 4


def test_described_gpus_are_divided_by_process():
    devices = _gpus(2)
    assert [[each.id for each in some] for some in slices(devices) or []] == [
        list(range(8)),
        list(range(8, 16)),
    ]


def test_slices_of_a_topology_are_kept_together():
    pytest.importorskip("libtpu")
    devices = two_slices()
    hybrid = HybridMeshShape(
        ici=mesh_shape_from_axes(expert=2, fsdp=-1), dcn=mesh_shape_from_axes(data=2)
    )
    mesh = create_device_mesh(hybrid, devices=devices)
    assert {name: size for name, size in mesh.shape.items() if size > 1} == {
        "data": 2,
        "expert": 2,
        "fsdp": 2,
    }
    slices = attributes(mesh.devices, "slice_index").reshape(2, 4)
    assert slices.tolist() == [[0] * 4, [1] * 4]
    for a, b in mesh.devices.reshape(4, 2):  # Neighbours along the last axis have a link.
        assert sum(abs(x - y) for x, y in zip(a.coords, b.coords, strict=True)) == 1


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("v6e:2x2", (2, 2)),
        ("v6e:2x4", (2, 4)),
        ("v6e:2x4", (4, 2)),
        ("v6e:2x4", (2, 2, 2)),
        ("v6e:4x4", (2, 8)),
        ("v5p:2x2x2", (2, 2, 2)),
    ],
)
def test_devices_along_an_axis_of_a_small_slice_differ_along_sides_only(name, sizes):
    devices = torus_devices(describe(name))
    names = tuple("abc"[: len(sizes)])
    mesh = create_device_mesh(sizes, names, devices).devices
    for axis, size in enumerate(sizes):
        first = np.moveaxis(mesh, axis, -1).reshape(-1, size)[0]
        sides = [len({device.coords[i] for device in first}) for i in range(3)]
        assert math.prod(sides) == size  # A line or a box, not a diagonal.


def test_every_mesh_reads_back_from_its_description():
    meshes = all_meshes(12, MESH_AXIS_NAMES)
    assert len(meshes) == len({tuple(mesh.items()) for mesh in meshes}) == 21 * 6  # 2 * 2 * 3.
    for mesh in meshes:
        shape = parse_mesh(describe_mesh(mesh), num_devices=12)
        assert describe_mesh(dict(zip(MESH_AXIS_NAMES, shape, strict=True))) == describe_mesh(mesh)
    assert describe_mesh(all_meshes(1, MESH_AXIS_NAMES)[0]) == "1 device"


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("fsdp=4, expert=2", (1, 1, 2, 4, 1, 1)),
        ("expert=2,fsdp=-1", (1, 1, 2, 4, 1, 1)),
        ("(1, 1, 2, -1, 1, 1)", (1, 1, 2, 4, 1, 1)),
        ("1,1,2,4,1,1", (1, 1, 2, 4, 1, 1)),
    ],
)
def test_a_mesh_is_named_axes_or_one_size_per_axis(text, shape):
    assert parse_mesh(text, num_devices=8) == shape


def test_an_inferred_size_is_kept_where_the_devices_are_unknown():
    assert parse_mesh("data=-1,fsdp=2") == mesh_shape_from_axes(data=-1, fsdp=2)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("fsdp", "'fsdp' is not axis=size"),
        ("fsdp=x", "'fsdp=x'"),
        ("", "''"),
        ("fdsp=8", "'fdsp'; did you mean 'fsdp'"),
        ("fsdp=2,fsdp=4", "fsdp occurs twice"),
        ("fsdp=0", r"\(1, 1, 1, 0, 1, 1\)"),
        ("fsdp=-1,data=-1", "-1"),
        ("2,4", "2 sizes for the 6 axes"),
        ("fsdp=3", "fsdp=3 takes 3 devices, but there are 8"),
    ],
)
def test_a_text_that_is_no_mesh_is_refused(text, named):
    with pytest.raises(UserError, match=f"--mesh.*{named}"):
        parse_mesh(text, num_devices=8, field="--mesh")


TWO, EXPERT = ("data", "model"), ("data", "expert")


@pytest.mark.parametrize(
    ("shape", "axes", "devices", "named"),
    [
        (mesh_shape_from_axes(data=3), MESH_AXIS_NAMES, None, r"data=3.*3 devices.*8.*-1"),
        (
            mesh_shape_from_axes(data=-1, fsdp=3),
            MESH_AXIS_NAMES,
            None,
            r"data=-1,fsdp=3.* 3 .* 8 devices.*1, 2, 4, 8",
        ),
        ((-1, -1), TWO, None, r"\(-1, -1\)"),
        ((0, 8), TWO, None, r"\(0, 8\)"),
        ((2, 4), ("data",), None, r"2 sizes.*1 axes"),
        ((-1, 2), TWO, on_slices(4, 4), r"data=4,model=2:.*2 slices"),
        (HybridMeshShape((-1,), (3,)), ("data",), None, r"3 slices.*8 devices"),
        (HybridMeshShape((1, 3), (2, 1)), TWO, on_slices(4, 4), r"model=3.*4"),
        (HybridMeshShape((4, 2), (2, 2)), EXPERT, _gpus(4), r"data, expert .*ici .*dcn"),
        *(
            (HybridMeshShape((-1, 1), dcn), TWO, devices, named)
            for dcn, devices, named in (
                ((4, 1), on_slices(4, 4), r"\(data=4\).*4 slices.*2"),
                ((1, 1), on_slices(4, 4), r"dcn \(1.*1 slices.*2"),
                ((2, 1), on_slices(4, 2), r"\(data=2\):.*4, 2 devices"),
                ((-1, 1), on_slices(4, 4), r"\(data=-1\):.*-1"),
                ((2,), on_slices(4, 4), r"dcn \(2,\).*1 sizes.*2 axes"),
                ((2, 1), on_processes(3, 12), r"\(data=2\).*12 devices.*3 processes"),
            )
        ),
    ],
)
def test_sizes_that_do_not_fit_the_axes_or_devices_are_refused(shape, axes, devices, named):
    with pytest.raises(UserError, match=named):
        create_device_mesh(shape, axes, devices)
