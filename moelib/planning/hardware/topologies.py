"""Topologies by name: connected devices that need not be present.

    v6e:2x2, v5p:4x4x4    one slice: TPU chips on a torus, described by libtpu
    2*v6e:4x4             two such slices
    h100:2x8              hosts x GPUs per host, described by JAX's CUDA plugin

A slice is a group of devices joined by fast links. For GPUs it is an NVLink domain: a host, or a
rack of a GB200.
"""

import dataclasses
import importlib.util
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from moelib.core.config import did_you_mean
from moelib.core.config_types import shortened
from moelib.core.errors import UserError
from moelib.parallel.mesh import slices
from moelib.planning.hardware import gpu_targets
from moelib.runtime.accelerators import ACCELERATORS, Accelerator
from moelib.runtime.platforms import describe_absent_tpus

EXAMPLES = {"tpu": "v6e:2x2", "gpu": "h100:2x8"}


class Torus(NamedTuple):
    """The torus of a TPU's slices. Source: Google Cloud's page on each accelerator."""

    num_dimensions: int  # A third dimension of two is 1.
    min_ring: int  # Smallest dimension that is a ring: a whole cube of 4, or the edge of a pod.
    chips_per_pod: int  # Largest slice.
    devices_per_chip: int = 1


TORI = {
    "v5e": Torus(2, 16, 256),
    "v6e": Torus(2, 16, 256),
    "v5p": Torus(3, 4, 8960),
    "tpu7x": Torus(3, 4, 9216, devices_per_chip=2),
}
_SIZE = "[0-9]{1,6}"
_NAME = re.compile(
    rf"(?:(?P<slices>{_SIZE})\*)?(?P<accelerator>[^:*]*):(?P<shape>{_SIZE}(?:x{_SIZE})*)"
)


class OutOfMemoryError(UserError):
    """A step that needs more memory than a device has."""


@dataclasses.dataclass(frozen=True)
class TopologyShape:
    """The numbers of devices and slices that a topology's name describes."""

    name: str
    accelerator: Accelerator
    num_slices: int
    devices_per_slice: int

    @property
    def num_devices(self) -> int:
        """Devices of all slices."""
        return self.num_slices * self.devices_per_slice


@dataclasses.dataclass(frozen=True)
class Topology:
    """Described devices, for which programs can be compiled."""

    name: str
    accelerator: Accelerator
    devices: Sequence[Any]


def describe(name: str) -> TopologyShape:
    """Returns the shape that a topology's name describes; the compiler may still refuse it.

    Raises:
        UserError: If the accelerator is unknown, or its shape is impossible.
    """
    name = name.lower()
    kind = name.partition(":")[0].rpartition("*")[2]
    if kind not in ACCELERATORS:
        raise UserError(
            f"topology {shortened(name)}: unknown accelerator {shortened(kind)}; "
            f"{did_you_mean(kind, ACCELERATORS)} Write a topology such as "
            f"{' or '.join(EXAMPLES.values())}."
        )
    accelerator = ACCELERATORS[kind]
    parts = _NAME.fullmatch(name)
    num_slices = int(parts["slices"] or 1) if parts else 0
    shape = tuple(int(side) for side in parts["shape"].split("x")) if parts else ()
    if not num_slices or 0 in shape:
        raise UserError(
            f"topology {shortened(name)} is not a shape; write sizes of 1 to 999999, joined by x, "
            f"as in {EXAMPLES[accelerator.platform]}, and 1 or more slices, as in "
            f"2*{EXAMPLES[accelerator.platform]}."
        )
    if accelerator.platform == "tpu":
        return _describe_tpu(name, accelerator, num_slices, shape)
    return _describe_gpu(name, accelerator, bool(parts and parts["slices"]), shape)


def present(devices: np.ndarray) -> TopologyShape | None:
    """Returns the shape of devices that are there, as a mesh has them; None if it is unknown."""
    kind, num = devices.flat[0].device_kind, devices.size
    known = (each for each in ACCELERATORS.values() if each.device_kind == kind)
    if (accelerator := next(known, None)) is None:
        return None
    num_slices = len(slices([*devices.flat]) or [devices])
    return TopologyShape(f"{num} x {kind}", accelerator, num_slices, num // num_slices)


@dataclasses.dataclass(frozen=True)
class TorusDevice:
    """A device on the torus of a slice, as JAX describes one to `create_device_mesh`."""

    id: int
    coords: tuple[int, ...]
    core_on_chip: int
    device_kind: str
    platform: str = "tpu"


def torus_devices(shape: TopologyShape) -> list[TorusDevice]:
    """Returns the devices of one slice without libtpu, for laying meshes; none for GPUs."""
    if shape.accelerator.platform != "tpu":
        return []
    sides = [int(side) for side in shape.name.rpartition(":")[2].split("x")]
    x, y, z = (*sides, 1)[:3]
    cores = TORI[shape.accelerator.name].devices_per_chip
    return [
        TorusDevice(i, (i // cores % x, i // cores // x % y, i // cores // x // y), i % cores, kind)
        for kind in [shape.accelerator.device_kind]
        for i in range(cores * x * y * z)
    ]


def _describe_tpu(
    name: str, accelerator: Accelerator, num_slices: int, shape: tuple[int, ...]
) -> TopologyShape:
    kind, chips = accelerator.name, math.prod(shape)
    torus, error = TORI[kind], ""
    flat, most = torus.num_dimensions == 2, torus.chips_per_pod
    if not 2 <= len(shape) <= 3 or (flat and shape[2:] not in ((), (1,))):
        error = f"{kind} has a torus of {'2' if flat else '2 or 3'} dimensions"
    elif chips > most:
        error = f"{chips} chips are more than the {most} of the largest {kind} slice"
    elif flat and any(side not in (1, 2, 4, 8, 16) for side in shape):
        error = f"dimensions of a {kind} slice are 1, 2, 4, 8 or 16"
    elif any(side > 1 and side % 2 for side in shape[:2]):
        error = f"the first two dimensions of a {kind} slice are 1 or even"
    if error:
        raise UserError(
            f"topology {shortened(name)}: {error}; write such a slice, as in "
            f"{EXAMPLES['tpu']}, or several, as in 2*{EXAMPLES['tpu']}."
        )
    return TopologyShape(name, accelerator, num_slices, chips * torus.devices_per_chip)


def _describe_gpu(
    name: str, accelerator: Accelerator, slices_given: bool, shape: tuple[int, ...]
) -> TopologyShape:
    most = accelerator.devices_per_host
    if slices_given or len(shape) != 2 or shape[1] > most:
        raise UserError(
            f"topology {shortened(name)}: write hosts x GPUs per host, at most {most} for "
            f"{accelerator.name}, as in {accelerator.name}:2x{most}."
        )
    hosts, gpus = shape
    domain = accelerator.devices_per_domain or most
    hosts_per_slice = 1 if domain <= most else min(hosts, domain // most)
    if hosts % hosts_per_slice:
        raise UserError(
            f"topology {name!r}: {hosts} hosts are not whole NVLink domains of {hosts_per_slice}; "
            f"write at most {hosts_per_slice} hosts, or a multiple."
        )
    return TopologyShape(name, accelerator, hosts // hosts_per_slice, hosts_per_slice * gpus)


def topology(name: str) -> Topology:
    """Returns the devices of a topology's name, as the compiler describes them.

    Raises:
        UserError: If the topology is impossible, or the compiler refuses it or is not installed.
    """
    shape = describe(name)
    devices = _tpus(shape) if shape.accelerator.platform == "tpu" else _gpus(shape)
    assert len(devices) == shape.num_devices, (shape, len(devices))
    return Topology(name, shape.accelerator, devices)


def _tpus(shape: TopologyShape) -> tuple[Any, ...]:
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            f"topology {shape.name!r}: libtpu, the compiler for TPUs, is not installed; "
            "pip install 'moelib[tpu]'."
        )
    describe_absent_tpus()
    import jax
    from jax.experimental import topologies

    one_slice = shape.name.rpartition("*")[2]
    slices = {"num_slices": shape.num_slices} if shape.num_slices > 1 else {}
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=one_slice, **slices)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ")
        raise UserError(
            f"topology {shape.name!r}: {reason.rstrip('.')}; write a shape in which "
            f"{shape.accelerator.name} is built, as in {EXAMPLES['tpu']}."
        ) from None
    return tuple(found.devices)


def _gpus(shape: TopologyShape) -> tuple[Any, ...]:
    if not gpu_targets.is_installed():
        raise UserError(
            f"topology {shape.name!r}: JAX's CUDA plugin, the compiler for GPUs, is not installed; "
            "pip install 'moelib[plan-gpu]', or 'moelib[gpu]' to train there too."
        )
    config = gpu_targets.target_config(shape.accelerator.device_kind)
    if config is None:
        raise UserError(
            f"topology {shape.name!r}: the installed CUDA plugin does not know "
            f"{shape.accelerator.device_kind}, only {', '.join(gpu_targets.target_configs())}; "
            "install a newer one."
        )
    from jax.experimental import topologies

    # One process per slice: described GPUs all report slice 0.
    found = topologies.get_topology_desc(
        platform="cuda",
        target_config=config,
        topology=f"{shape.num_slices}x1x{shape.devices_per_slice}",
    )
    return tuple(found.devices)
