"""Links: what collectives of a mesh axis send, and how long that takes at the links' peak.

A collective over a group that spans slices is taken apart: inside a slice it uses links (ICI,
NVLink), between slices the network (DCN, InfiniBand), each part of it only once.

On a torus a device is wired to two others along each dimension, to one where the dimension has size
2 or is a line. A mesh axis uses of these links a share, as its size has of the slice's; all-to-all
crosses several on its way.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

from moelib.planning.estimate.candidates import Mesh
from moelib.planning.hardware.topologies import DEVICES_PER_CHIP, TopologyShape

# A dimension of a torus is a ring from this size on: of whole cubes of 4 on v5p and tpu7x, of a
# whole pod's edge on v5e and v6e. Source: Google Cloud's documentation of their topologies.
_RING = {"v5e": 16, "v6e": 16, "v5p": 4, "tpu7x": 4}
_DIMENSIONS = {"v5e": 2, "v6e": 2, "v5p": 3, "tpu7x": 3}


@dataclasses.dataclass(frozen=True)
class Sent:
    """What one device sends, and for how long its links are at it, at their peak.

    Attributes:
        links_bytes: To devices of its slice.
        network_bytes: To other slices.
        links_seconds: Of the first.
        network_seconds: Of the second.
    """

    links_bytes: float = 0.0
    network_bytes: float = 0.0
    links_seconds: float = 0.0
    network_seconds: float = 0.0

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(
            self.links_bytes + other.links_bytes,
            self.network_bytes + other.network_bytes,
            self.links_seconds + other.links_seconds,
            self.network_seconds + other.network_seconds,
        )

    def times(self, factor: float) -> "Sent":
        """Returns as much, multiplied."""
        return Sent(
            self.links_bytes * factor,
            self.network_bytes * factor,
            self.links_seconds * factor,
            self.network_seconds * factor,
        )


class Links:
    """What the links of a topology carry for a mesh."""

    def __init__(self, topology: TopologyShape, mesh: Mesh) -> None:
        self._topology, self._mesh = topology, mesh

    def _group(self, axes: Sequence[str]) -> tuple[int, int]:
        """Returns how many devices of a slice are in a group, and of how many slices."""
        inside = math.prod(self._mesh.inside.get(axis, 1) for axis in axes)
        return inside, math.prod(self._mesh.across.get(axis, 1) for axis in axes)

    def _devices_of_chip(self, axes: Sequence[str]) -> int:
        """Returns how many devices of a chip a group has.

        A mesh is laid on whole dimensions of the torus where sizes allow it, so a group has both
        if its size is made of no such; where sizes do not tell, the innermost axis has both.
        """
        num = DEVICES_PER_CHIP.get(self._topology.accelerator.name, 1)
        inside, _ = self._group(axes)
        if num == 1 or inside % num:
            return 1
        taken = itertools.product(*((1, side) for side in _sides(self._topology)))
        dimensions = {math.prod(sides) for sides in taken}
        rest = self._topology.devices_per_slice // inside
        if inside in dimensions and (
            rest not in dimensions or [*self._mesh.inside][-1] not in axes
        ):
            return 1
        return num

    def gathered(self, axes: Sequence[str], bytes_: float) -> Sent:
        """Returns what an all-gather sends whose result has so many bytes; a reduce-scatter too."""
        inside, across = self._group(axes)
        links = bytes_ * (inside - 1) / inside
        # Devices of a chip receive each a part of what both need, and pass it on in the chip.
        links /= self._devices_of_chip(axes)
        return self._sent(inside, links, bytes_ / inside * (across - 1) / across)

    def reduced(self, axes: Sequence[str], bytes_: float) -> Sent:
        """Returns what an all-reduce of so many bytes sends."""
        return self.gathered(axes, bytes_).times(2.0)

    def exchanged(self, axes: Sequence[str], bytes_: float) -> Sent:
        """Returns what an all-to-all sends, of rows of so many bytes, evenly for all."""
        inside, across = self._group(axes)
        n = inside * across
        links, network = bytes_ * (inside - 1) / n, bytes_ * (n - inside) / n
        if inside == 1 or self._topology.accelerator.platform != "tpu":
            return self._sent(inside, links, network)
        seconds = (
            bytes_
            * inside
            / n
            * _crossing(self._topology, inside // self._devices_of_chip(axes))
            / _of_one_link(self._topology)
        )
        return dataclasses.replace(self._sent(inside, links, network), links_seconds=seconds)

    def passed(self, axes: Sequence[str], bytes_: float) -> Sent:
        """Returns what a device sends that passes so many bytes on, once round a ring."""
        inside, across = self._group(axes)
        n = inside * across
        return self._sent(inside, bytes_ * n, bytes_ * n if across > 1 else 0.0)

    def _sent(self, inside: int, links: float, network: float) -> Sent:
        accelerator = self._topology.accelerator
        seconds = links / links_bytes_per_second(self._topology, inside) if links else 0.0
        return Sent(links, network, seconds, network / accelerator.network_bytes_per_second)


def links_bytes_per_second(topology: TopologyShape, group: int) -> float:
    """Returns what a device sends at most to a group of devices of its slice."""
    accelerator = topology.accelerator
    if accelerator.platform != "tpu" or group == 1:
        return accelerator.link_bytes_per_second  # A switch joins all.
    return _of_one_link(topology) * _share(topology, group)


def _of_one_link(topology: TopologyShape) -> float:
    accelerator = topology.accelerator
    return accelerator.link_bytes_per_second / (2 * _DIMENSIONS[accelerator.name])


def _sides(topology: TopologyShape) -> list[int]:
    """Returns the chips along each dimension of a slice's torus, those of 1 left out."""
    shape = topology.name.rpartition(":")[2].split("x")
    return [int(side) for side in shape if side != "1"]


@functools.cache
def _crossing(topology: TopologyShape, chips: int) -> float:
    """Returns a link's seconds of an all-to-all of so many chips, in those of a device's rows.

    Half of the rows of a half of a dimension of k chips cross its middle: over one link of a line,
    k / 4 of a device's rows; over two of a ring, k / 8. The longest dimension takes longest. A
    group has whole dimensions of the slice if some have its size, and parts of them otherwise.
    """
    kind, sides = topology.accelerator.name, _sides(topology)
    parts = [[d for d in range(1, side + 1) if side % d == 0] for side in sides]
    laid = [each for each in itertools.product(*parts) if math.prod(each) == chips]
    pairs = [[(k, k == side) for k, side in zip(e, sides, strict=True) if k > 1] for e in laid]
    whole = [each for each in pairs if all(ring for _, ring in each)]
    return min(
        max((k / (8 if ring and k >= _RING[kind] else 4) for k, ring in each), default=0.25)
        for each in whole or pairs or [[(chips, False)]]
    )


@functools.cache
def _share(topology: TopologyShape, group: int) -> float:
    """Returns how many links of a device a group of this size has, 1 or more."""
    kind = topology.accelerator.name
    sizes = _sides(topology)
    links = sum(2 if size >= _RING[kind] else 1 for size in sizes)
    devices = max(math.prod(sizes), 2)
    return max(1.0, links * min(math.log(max(group, 1)) / math.log(devices), 1.0))
