"""Links: what collectives of a mesh axis send, and how long that takes at the links' peak.

A collective over a group that spans slices is taken apart: inside a slice it uses links (ICI,
NVLink), between slices the network (DCN, InfiniBand), each part of it only once.

On a torus a device is wired to two others along each dimension, to one where the dimension has size
2 or is a line. A mesh axis uses of these links a share, as its size has of the slice's; all-to-all
crosses several on its way.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

from moelib.planning.candidates import Mesh
from moelib.planning.topologies import DEVICES_PER_CHIP, TopologyShape

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

    def gathered(self, axes: Sequence[str], bytes_: float) -> Sent:
        """Returns what an all-gather sends whose result has so many bytes; a reduce-scatter too."""
        inside, across = self._group(axes)
        links = bytes_ * (inside - 1) / inside
        if inside == self._topology.devices_per_slice:
            # Devices of a chip receive each a part of what both need, and pass it on in the chip.
            links /= DEVICES_PER_CHIP.get(self._topology.accelerator.name, 1)
        return self._sent(inside, links, bytes_ / inside * (across - 1) / across, hops=1.0)

    def reduced(self, axes: Sequence[str], bytes_: float) -> Sent:
        """Returns what an all-reduce of so many bytes sends."""
        return self.gathered(axes, bytes_).times(2.0)

    def exchanged(self, axes: Sequence[str], bytes_: float) -> Sent:
        """Returns what an all-to-all sends, of rows of so many bytes, evenly for all."""
        inside, across = self._group(axes)
        n = inside * across
        hops = 1.0
        if self._topology.accelerator.platform == "tpu":
            dims = max(_share(self._topology, inside) / 2, 0.5)
            # Along each ring of k devices, in both directions: k / 4 links on the way.
            hops = max(1.0, inside ** (1 / max(dims, 1.0)) / 4)
        return self._sent(inside, bytes_ * (inside - 1) / n, bytes_ * (n - inside) / n, hops)

    def passed(self, axes: Sequence[str], bytes_: float) -> Sent:
        """Returns what a device sends that passes so many bytes on, once round a ring."""
        inside, across = self._group(axes)
        n = inside * across
        return self._sent(inside, bytes_ * n, bytes_ * n if across > 1 else 0.0, hops=1.0)

    def _sent(self, inside: int, links: float, network: float, hops: float) -> Sent:
        accelerator = self._topology.accelerator
        seconds = hops * links / links_bytes_per_second(self._topology, inside) if links else 0.0
        return Sent(links, network, seconds, network / accelerator.network_bytes_per_second)


def links_bytes_per_second(topology: TopologyShape, group: int) -> float:
    """Returns what a device sends at most to a group of devices of its slice."""
    accelerator = topology.accelerator
    if accelerator.platform != "tpu" or group == 1:
        return accelerator.link_bytes_per_second  # A switch joins all.
    of_one = accelerator.link_bytes_per_second / (2 * _DIMENSIONS[accelerator.name])
    return of_one * _share(topology, group)


@functools.cache
def _share(topology: TopologyShape, group: int) -> float:
    """Returns how many links of a device a group of this size has, 1 or more."""
    kind = topology.accelerator.name
    shape = topology.name.rpartition(":")[2].split("x")
    sizes = [int(size) for size in shape if size != "1"]
    links = sum(2 if size >= _RING[kind] else 1 for size in sizes)
    devices = max(math.prod(sizes), 2)
    return max(1.0, links * min(math.log(max(group, 1)) / math.log(devices), 1.0))
