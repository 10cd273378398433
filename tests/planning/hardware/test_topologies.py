"""Names of topologies, and errors for impossible ones."""

import dataclasses
import importlib.util

import pytest
from jax.experimental.pallas import tpu as pltpu

from moelib.core.errors import UserError
from moelib.parallel.mesh import (
    MESH_AXIS_NAMES,
    HybridMeshShape,
    all_meshes,
    create_device_mesh,
    mesh_shape_from_axes,
    shared_sides,
)
from moelib.planning.hardware import gpu_targets, topologies
from moelib.planning.hardware.topologies import describe, topology, torus_devices
from moelib.runtime.accelerators import ACCELERATORS

_GPUS = [name for name, each in ACCELERATORS.items() if each.platform == "gpu"]
_TPUS = [name for name, each in ACCELERATORS.items() if each.platform == "tpu"]

needs_cuda_plugin = pytest.mark.skipif(
    not gpu_targets.is_installed(), reason="JAX's CUDA plugin is not installed"
)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("banana:2x2", r"b200.*v6e.*v6e:2x2 or h100:2x8"),
        ("", r"b200.*v6e.*v6e:2x2 or h100:2x8"),
        ("2*:2x2", r"b200.*v6e.*v6e:2x2 or h100:2x8"),
        ("h10:1x8", "'h100'"),
        *((shape, "as in v6e:2x2") for shape in ("v6e", "v6e:", "v6e:2x", "v6e:0x2")),
        *((shape, "as in v6e:2x2") for shape in ("v6e:" + "9" * 5000, "²*v6e:2x2", "0*v6e:2x2")),
        *((shape, "as in h100:2x8") for shape in ("h100:a", "h100:99999999999x8")),
        ("v6e:4x4x4", "2 dimensions"),
        ("v5p:4", "2.*3 dimensions"),
        ("v6e:64x64", "4096 chips .* 256"),
        ("v5p:16x20x29", " 8960 "),
        ("v6e:3x5", r"v6e.*1, 2, 4, 8.*16"),
        ("2*v5e:32x4", "v5e"),
        ("v5p:3x3x3", "v5p.*1 or even"),
        ("tpu7x:4x7x2", "tpu7x.*1 or even"),
        ("h100:16", "8.*h100:2x8"),
        ("h100:1x16", "8.*h100:2x8"),
        ("gb200:1x8", "4.*gb200:2x4"),
        ("2*h100:1x8", "GPUs"),
        ("gb200:27x4", "NVLink.*18"),
    ],
)
def test_impossible_names_are_refused(name, message):
    with pytest.raises(UserError, match=message):
        describe(name)


@pytest.mark.parametrize(
    ("name", "num_slices", "devices_per_slice"),
    [
        ("v6e:2x2", 1, 4),
        ("v6e:2x2x1", 1, 4),
        ("2*v6e:4x4", 2, 16),
        ("v5p:4x4x4", 1, 64),
        ("tpu7x:2x2x1", 1, 8),  # Two devices per chip.
        ("h100:2x8", 2, 8),  # NVLink ends at a host.
        ("h200:1x4", 1, 4),
        ("gb200:2x4", 1, 8),  # NVLink joins a rack of 18 hosts.
        ("gb200:36x4", 2, 72),
        ("gb200:36x2", 2, 36),
    ],
)
def test_a_name_gives_the_number_of_devices_and_slices(name, num_slices, devices_per_slice):
    found = describe(name)
    assert (found.num_slices, found.devices_per_slice) == (num_slices, devices_per_slice)


def test_a_missing_compiler_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"'moelib\[tpu\]'"):
        topology("v6e:2x2")
    with pytest.raises(UserError, match=r"'moelib\[plan-gpu\]'"):
        topology("h100:1x8")


def test_figures_agree_with_those_of_pallas():
    # Pallas describes one of the two cores of v5p.
    for name, version in (("v5e", "TPU_V5E"), ("v6e", "TPU_V6E"), ("tpu7x", "TPU_7X")):
        info = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion[version], 1)
        ours = ACCELERATORS[name]
        assert ours.flops_per_second == pytest.approx(info.bf16_ops_per_second, rel=0.01)
        assert ours.hbm_bytes_per_second == pytest.approx(info.mem_bw_bytes_per_second, rel=0.01)


@pytest.mark.parametrize("name", _TPUS)
def test_libtpu_describes_every_tpu(name):
    pytest.importorskip("libtpu")
    found = topology(f"{name}:2x2")
    assert len(found.devices) == (8 if name == "tpu7x" else 4)
    assert found.devices[0].device_kind == found.accelerator.device_kind


def test_slices_of_tpus_know_which_they_are():
    pytest.importorskip("libtpu")
    assert [device.slice_index for device in topology("2*v6e:2x2").devices] == [0] * 4 + [1] * 4


def test_a_shape_that_libtpu_refuses_is_one_line(monkeypatch):
    pytest.importorskip("libtpu")
    shape = dataclasses.replace(describe("v5p:2x2x1"), name="v5p:3x7x1")
    monkeypatch.setattr(topologies, "describe", lambda name: shape)
    with pytest.raises(UserError, match=r"v5p:3x7x1.*v6e:2x2") as error:
        topology("v5p:3x7x1")
    assert "\n" not in str(error.value)


@needs_cuda_plugin
@pytest.mark.parametrize("name", _GPUS)
def test_the_cuda_plugin_describes_every_gpu(name):
    accelerator = ACCELERATORS[name]
    found = topology(f"{name}:1x4")
    assert len(found.devices) == 4
    assert found.devices[0].device_kind == accelerator.device_kind
    config = gpu_targets.target_config(accelerator.device_kind)
    hbm_bytes = int(config.partition("device_memory_size: ")[2].split()[0])
    assert 0.915 < accelerator.hbm_bytes / hbm_bytes <= 0.92
    bandwidth = int(config.partition("memory_bandwidth: ")[2].split()[0])
    assert accelerator.hbm_bytes_per_second == pytest.approx(bandwidth, rel=0.05)


@needs_cuda_plugin
def test_each_host_of_gpus_is_a_slice_that_a_mesh_asks_for():
    devices = topology("h100:2x8").devices
    with pytest.raises(ValueError, match=r"2 slices.*HybridMesh"):
        create_device_mesh((2, 8), ("fsdp", "expert"), devices)
    mesh = create_device_mesh(HybridMeshShape((8, 1), (1, 2)), ("expert", "fsdp"), devices)
    assert dict(mesh.shape) == {"fsdp": 2, "expert": 8}
    assert [{each.process_index for each in row} for row in mesh.devices] == [{0}, {1}]
    assert [each.id for each in mesh.devices.flat] == list(range(16))  # As XLA:GPU assumes.


# Slices of 4 to 256 chips that Google Cloud rents.
_SLICES = [
    *(f"{kind}:{shape}" for kind in ("v5e", "v6e") for shape in
      ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")),
    *(f"{kind}:{shape}" for kind in ("v5p", "tpu7x") for shape in
      ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x4x12", "4x8x8")),
]  # fmt: skip


@pytest.mark.parametrize("name", ["v6e:4x4", "v6e:4x8", "v6e:16x16", "v5p:4x4x12", "tpu7x:4x4x4"])
def test_every_mesh_of_three_axes_is_laid_on_the_torus(name):
    check_meshes(torus_devices(describe(name)), ("expert", "fsdp", "model"))


@pytest.mark.slow
@pytest.mark.parametrize("name", _SLICES)
def test_every_mesh_is_laid_on_the_torus(name):
    check_meshes(topology(name).devices, MESH_AXIS_NAMES)


def check_meshes(devices, names):
    for sizes in all_meshes(len(devices), names):
        mesh = create_device_mesh([sizes.get(name, 1) for name in names], names, devices)
        assert len({device.id for device in mesh.devices.flat}) == len(devices)
        assert {name: size for name, size in mesh.shape.items() if size > 1} == sizes


@pytest.mark.parametrize(
    ("name", "axes", "shared"),
    [
        ("v6e:8x8", {"fsdp": 32, "expert": 2}, ["8 = expert 2 x fsdp 4"]),
        ("v6e:8x8", {"fsdp": 8, "expert": 8}, []),
        ("v5p:4x4x4", {"fsdp": 4, "expert": 16}, []),
        ("v5p:4x4x4", {"fsdp": 8, "expert": 8}, ["4 = expert 2 x fsdp 2"]),
        ("tpu7x:4x4x4", {"fsdp": 16, "model": 8}, []),
        ("tpu7x:4x4x4", {"expert": 8, "fsdp": 8, "model": 2}, ["4 = expert 2 x fsdp 2"]),
    ],
)
def test_the_heaviest_axis_has_whole_sides_and_shared_ones_are_named(name, axes, shared):
    mesh = create_device_mesh(mesh_shape_from_axes(**axes), devices=torus_devices(describe(name)))
    assert shared_sides(mesh.devices, mesh.axis_names) == shared


def test_meshes_over_slices_are_laid_on_each_torus():
    devices = topology("2*v6e:4x4").devices
    inside = mesh_shape_from_axes(expert=8, fsdp=2)
    mesh = create_device_mesh(
        HybridMeshShape(inside, mesh_shape_from_axes(fsdp=2)), devices=devices
    )
    assert shared_sides(mesh.devices, mesh.axis_names) == ["4 = expert 2 x fsdp 2"]
    rows = mesh.devices.reshape(8, 4)  # Along fsdp, the devices of a slice are neighbors.
    assert [{device.slice_index for device in rows[:, i]} for i in range(4)] == [{0}, {0}, {1}, {1}]


@pytest.mark.parametrize("name", ["v6e:4x8", "v5p:4x4x4", "tpu7x:2x2x4"])
def test_tori_are_those_that_libtpu_describes(name):
    position = lambda device: (tuple(device.coords), device.core_on_chip, device.device_kind)
    ours = create_device_mesh((-1, 4), ("data", "model"), [*torus_devices(describe(name))])
    theirs = create_device_mesh((-1, 4), ("data", "model"), topology(name).devices)
    assert [*map(position, ours.devices.flat)] == [*map(position, theirs.devices.flat)]
