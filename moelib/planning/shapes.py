"""Topologies by name alone: which accelerator, how many slices of how many devices."""

import dataclasses
import math
import re

from moelib.core.config import did_you_mean
from moelib.planning.hardware import ACCELERATORS, Accelerator
from moelib.planning.topologies import PlanError

_NAME = re.compile(r"(?:(?P<slices>[1-9]\d*)\*)?(?P<kind>\w+):(?P<shape>[1-9]\d*(?:x[1-9]\d*)*)")
DEVICES_PER_CHIP = {"tpu7x": 2}


@dataclasses.dataclass(frozen=True)
class TopologyShape:
    """What a topology's name says.

    Attributes:
        name: As it was given.
        accelerator: Of its devices.
        num_slices: Groups of devices between which only a network is: slices, or hosts of GPUs.
        devices_per_slice: Devices, as JAX counts them, of one.
    """

    name: str
    accelerator: Accelerator
    num_slices: int
    devices_per_slice: int

    @property
    def num_devices(self) -> int:
        """All devices."""
        return self.num_slices * self.devices_per_slice


def describe(name: str) -> TopologyShape:
    """Returns what a name says: v6e:2x2, 2*v6e:4x4 (two slices), h100:2x8 (two hosts of eight).

    Raises:
        PlanError: If the name is not of this form, or the accelerator is not known.
    """
    found = _NAME.fullmatch(name.strip())
    kind = found["kind"] if found else name.strip().partition(":")[0].rpartition("*")[2]
    if kind not in ACCELERATORS:
        raise PlanError(
            f"topology {name!r}: there is no accelerator {kind!r} ({', '.join(ACCELERATORS)}); "
            + did_you_mean(kind, ACCELERATORS)
        )
    if not found:
        raise PlanError(
            f"topology {name!r}: write accelerator:shape, such as v6e:2x2, 2*v6e:4x4 for two "
            "slices, or h100:2x8 for two hosts of eight GPUs."
        )
    accelerator, shape = ACCELERATORS[kind], [int(size) for size in found["shape"].split("x")]
    num_slices = int(found["slices"] or 1)
    if accelerator.platform == "tpu":
        devices = math.prod(shape) * DEVICES_PER_CHIP.get(kind, 1)
        return TopologyShape(name, accelerator, num_slices, devices)
    most = accelerator.devices_per_domain or 8
    if len(shape) != 2 or shape[1] > most:
        raise PlanError(
            f"topology {name!r}: write {kind}:HOSTSxGPUS with at most {most} GPUs a host, such as "
            f"{kind}:2x{most}."
        )
    return TopologyShape(name, accelerator, num_slices * shape[0], shape[1])
