"""Topologies by name: devices that are wired together, though they are not here.

    v6e:2x2, v5p:4x4x4    one slice: TPU chips on a torus, as libtpu describes it
    2*v6e:4x4             two such slices
    h100:2x8              hosts x GPUs of a host, as JAX's CUDA plugin describes them

A slice is what fast links join. One of GPUs is an NVLink domain: a host, or a rack of a GB200.
"""

import dataclasses
import importlib.util
import math
import re
from collections.abc import Sequence
from typing import Any

from moelib.core.accelerators import ACCELERATORS, Accelerator
from moelib.core.config import did_you_mean
from moelib.core.errors import UserError
from moelib.core.platforms import describe_absent_tpus
from moelib.planning.hardware import gpu_targets

EXAMPLES = {"tpu": "v6e:2x2", "gpu": "h100:2x8"}

_NAME = re.compile(r"(?:(?P<slices>\d+)\*)?(?P<accelerator>[^:*]*):(?P<shape>\d+(?:x\d+)*)")
DEVICES_PER_CHIP = {"tpu7x": 2}
_FLAT = ("v5e", "v6e")  # Their torus has two dimensions; a third is 1.
# Chips of a pod, by Google's pages on each: no slice has more.
_CHIPS_PER_POD = {"v5e": 256, "v6e": 256, "v5p": 8960, "tpu7x": 9216}


class PlanError(UserError):
    """What is asked for cannot be planned; the message is all one needs."""


class OutOfMemoryError(PlanError):
    """A step takes more memory than a device has."""


@dataclasses.dataclass(frozen=True)
class TopologyShape:
    """How many devices of what: all that a topology's name says."""

    name: str
    accelerator: Accelerator
    num_slices: int
    devices_per_slice: int

    @property
    def num_devices(self) -> int:
        """All devices."""
        return self.num_slices * self.devices_per_slice


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices that are wired together, though they are not here."""

    name: str
    accelerator: Accelerator
    devices: Sequence[Any]


def describe(name: str) -> TopologyShape:
    """Returns what a topology's name says; no compiler is loaded, so it may yet refuse the shape.

    Raises:
        PlanError: If the accelerator is not known or the shape is none of its own.
    """
    said = name.partition(":")[0].rpartition("*")[2]
    if said not in ACCELERATORS:
        raise PlanError(
            f"topology {name!r} is not known: write an accelerator ({', '.join(ACCELERATORS)}), a "
            f"colon and a shape, such as {' or '.join(EXAMPLES.values())}; "
            f"{did_you_mean(said, ACCELERATORS)}"
        )
    accelerator = ACCELERATORS[said]
    parts = _NAME.fullmatch(name)
    num_slices = int(parts["slices"] or 1) if parts else 0
    shape = tuple(int(side) for side in parts["shape"].split("x")) if parts else ()
    if not num_slices or 0 in shape:
        raise PlanError(
            f"topology {name!r}: {name.partition(':')[2]!r} is no shape; write sizes of 1 or more "
            f"with x between, as in {EXAMPLES[accelerator.platform]}."
        )
    if accelerator.platform == "tpu":
        return _describe_tpu(name, accelerator, num_slices, shape)
    return _describe_gpu(name, accelerator, bool(parts and parts["slices"]), shape)


def _describe_tpu(
    name: str, accelerator: Accelerator, num_slices: int, shape: tuple[int, ...]
) -> TopologyShape:
    if not 2 <= len(shape) <= 3 or (accelerator.name in _FLAT and shape[2:] not in ((), (1,))):
        sides = "2" if accelerator.name in _FLAT else "2 or 3"
        raise PlanError(
            f"topology {name!r}: the chips of {accelerator.name} lie on a torus of {sides} "
            f"dimensions; write one, as in {EXAMPLES['tpu']}."
        )
    chips, most = math.prod(shape), _CHIPS_PER_POD[accelerator.name]
    if chips > most:
        raise PlanError(
            f"topology {name!r}: a slice of {accelerator.name} has up to {most} chips, and this "
            f"one would have {chips}; write several slices, as in 2*{EXAMPLES['tpu']}."
        )
    if accelerator.name in _FLAT and any(side not in (1, 2, 4, 8, 16) for side in shape):
        raise PlanError(
            f"topology {name!r}: sides of a slice of {accelerator.name} are 1, 2, 4, 8 or 16; "
            f"write such ones, as in {EXAMPLES['tpu']}."
        )
    num = math.prod(shape) * DEVICES_PER_CHIP.get(accelerator.name, 1)
    return TopologyShape(name, accelerator, num_slices, num)


def _describe_gpu(
    name: str, accelerator: Accelerator, slices_given: bool, shape: tuple[int, ...]
) -> TopologyShape:
    most = accelerator.devices_per_host
    if slices_given or len(shape) != 2 or shape[1] > most:
        raise PlanError(
            f"topology {name!r}: write the hosts and the GPUs of a host, of which "
            f"{accelerator.name} has up to {most}: such as {accelerator.name}:2x{most}."
        )
    hosts, gpus = shape
    domain = accelerator.devices_per_domain or most
    hosts_per_slice = 1 if domain <= most else min(hosts, domain // gpus)
    if hosts % hosts_per_slice:
        raise PlanError(
            f"topology {name!r}: {hosts} hosts are not whole NVLink domains of {hosts_per_slice}; "
            f"write up to {hosts_per_slice} of them, or a multiple."
        )
    return TopologyShape(name, accelerator, hosts // hosts_per_slice, hosts_per_slice * gpus)


def topology(name: str) -> Topology:
    """Returns the devices of a topology's name, as the compiler describes them.

    Raises:
        PlanError: As for `describe`, or if the compiler refuses the shape or is not installed.
    """
    shape = describe(name)
    devices = _tpus(shape) if shape.accelerator.platform == "tpu" else _gpus(shape)
    assert len(devices) == shape.num_devices, (shape, len(devices))
    return Topology(name, shape.accelerator, devices)


def _tpus(shape: TopologyShape) -> tuple[Any, ...]:
    if importlib.util.find_spec("libtpu") is None:
        raise PlanError(
            f"topology {shape.name!r}: libtpu, which compiles for TPUs, is not installed; "
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
        said = str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ")
        raise PlanError(
            f"topology {shape.name!r}: {said.rstrip('.')}; write a shape that "
            f"{shape.accelerator.name} is built in, as in {EXAMPLES['tpu']}."
        ) from None
    return tuple(found.devices)


def _gpus(shape: TopologyShape) -> tuple[Any, ...]:
    if not gpu_targets.is_installed():
        raise PlanError(
            f"topology {shape.name!r}: JAX's CUDA plugin, which compiles for GPUs, is not "
            "installed; pip install 'moelib[plan-gpu]', or 'moelib[gpu]' to train there too."
        )
    config = gpu_targets.target_config(shape.accelerator.device_kind)
    if config is None:
        raise PlanError(
            f"topology {shape.name!r}: the installed CUDA plugin does not know "
            f"{shape.accelerator.device_kind}, only {', '.join(gpu_targets.target_configs())}; "
            "install a newer one."
        )
    from jax.experimental import topologies

    # A process a slice: devices of a description all say that they are of slice 0.
    found = topologies.get_topology_desc(
        platform="cuda",
        target_config=config,
        topology=f"{shape.num_slices}x1x{shape.devices_per_slice}",
    )
    return tuple(found.devices)
