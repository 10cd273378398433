"""Links: the traffic of a collective along mesh axes, and its time at the links' peak rate.

A collective over several slices is split in two: inside a slice it uses links (ICI, NVLink), and
between slices the network (DCN, InfiniBand), which each byte crosses once.

On a torus a device has two neighbors along each dimension, or one where the dimension has size 2 or
is a line. A mesh axis uses a share of these links, as its size is a share of the slice; messages of
an all-to-all cross several links.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

from moelib.planning.estimate.candidates import Mesh
from moelib.planning.hardware.topologies import TORI, TopologyShape


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that one device sends, and the seconds that takes at the peak rate."""

    links_bytes: float = 0.0  # To devices of its slice.
    network_bytes: float = 0.0  # To other slices.
    links_seconds: float = 0.0
    network_seconds: float = 0.0

    def __add__(self, other: "Traffic") -> "Traffic":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Traffic(*(a + b for a, b in pairs))

    def times(self, factor: float) -> "Traffic":
        """Returns the traffic times a factor."""
        return Traffic(*(value * factor for value in dataclasses.astuple(self)))


class Links:
    """The links of a topology, as a mesh uses them."""

    def __init__(self, topology: TopologyShape, mesh: Mesh) -> None:
        self._topology, self._mesh = topology, mesh

    def _group(self, axes: Sequence[str]) -> tuple[int, int]:
        """Returns the size of a group of devices along some axes: (inside a slice, slices)."""
        inside = math.prod(self._mesh.inside.get(axis, 1) for axis in axes)
        return inside, math.prod(self._mesh.across.get(axis, 1) for axis in axes)

    def _devices_per_chip(self, axes: Sequence[str]) -> int:
        """Returns the number of devices of one chip in a group.

        Meshes are laid on whole dimensions of the torus where sizes allow it, so a group has both
        devices of a chip if its size is not a product of such dimensions; where sizes do not tell,
        the innermost axis has both.
        """
        torus = TORI.get(self._topology.accelerator.name)
        num, (inside, _) = torus.devices_per_chip if torus else 1, self._group(axes)
        if num == 1 or inside % num:
            return 1
        taken = itertools.product(*((1, side) for side in _sides(self._topology)))
        products = {math.prod(sides) for sides in taken}
        rest = self._topology.devices_per_slice // inside
        innermost = [*self._mesh.inside][-1]
        whole = inside in products and (rest not in products or innermost not in axes)
        return 1 if whole else num

    def all_gather(self, axes: Sequence[str], num_bytes: float) -> Traffic:
        """Returns the traffic of an all-gather by bytes of its result; also of a reduce-scatter."""
        inside, across = self._group(axes)
        links = num_bytes * (inside - 1) / inside
        # Devices of a chip each receive part of what both need, and pass it on inside the chip.
        links /= self._devices_per_chip(axes)
        return self._traffic(inside, links, num_bytes / inside * (across - 1) / across)

    def all_reduce(self, axes: Sequence[str], num_bytes: float) -> Traffic:
        """Returns the traffic of an all-reduce by bytes of its result."""
        return self.all_gather(axes, num_bytes).times(2.0)

    def all_to_all(self, axes: Sequence[str], num_bytes: float) -> Traffic:
        """Returns the traffic of an even all-to-all by bytes of a device's operand."""
        inside, across = self._group(axes)
        n = inside * across
        links, network = num_bytes * (inside - 1) / n, num_bytes * (n - inside) / n
        traffic = self._traffic(inside, links, network)
        if inside == 1 or self._topology.accelerator.platform != "tpu":
            return traffic
        crossing = _crossing(self._topology, inside // self._devices_per_chip(axes))
        seconds = num_bytes * inside / n * crossing / _bytes_per_second_of_link(self._topology)
        return dataclasses.replace(traffic, links_seconds=seconds)

    def ring(self, axes: Sequence[str], num_bytes: float) -> Traffic:
        """Returns the traffic of passing bytes on, once around a ring."""
        inside, across = self._group(axes)
        n = inside * across
        return self._traffic(inside, num_bytes * n, num_bytes * n if across > 1 else 0.0)

    def _traffic(self, inside: int, links: float, network: float) -> Traffic:
        accelerator = self._topology.accelerator
        seconds = links / links_bytes_per_second(self._topology, inside) if links else 0.0
        return Traffic(links, network, seconds, network / accelerator.network_bytes_per_second)


def links_bytes_per_second(topology: TopologyShape, group: int) -> float:
    """Returns the peak rate from a device to a group of devices of its slice."""
    accelerator = topology.accelerator
    if accelerator.platform != "tpu" or group == 1:
        return accelerator.link_bytes_per_second  # A switch connects all.
    return _bytes_per_second_of_link(topology) * _num_links(topology, group)


def _bytes_per_second_of_link(topology: TopologyShape) -> float:
    accelerator = topology.accelerator
    return accelerator.link_bytes_per_second / (2 * TORI[accelerator.name].num_dimensions)


def _sides(topology: TopologyShape) -> list[int]:
    """Returns the dimensions of a slice's torus in chips, without those of size 1."""
    shape = topology.name.rpartition(":")[2].split("x")
    return [int(side) for side in shape if side != "1"]


@functools.cache
def _crossing(topology: TopologyShape, chips: int) -> float:
    """Returns the time of an all-to-all of some chips, as a multiple of one device's over one link.

    In a dimension of k chips, half of the rows of half of the chips cross its middle: k / 4 of a
    device's rows over the one link of a line, k / 8 over each of two links of a ring. The longest
    dimension takes longest. A group lies on whole dimensions of the slice if some have its size,
    and on parts of them otherwise.
    """
    least, sides = TORI[topology.accelerator.name].min_ring, _sides(topology)
    parts = [[d for d in range(1, side + 1) if side % d == 0] for side in sides]
    layouts = [each for each in itertools.product(*parts) if math.prod(each) == chips]
    pairs = [[(k, k == side) for k, side in zip(e, sides, strict=True) if k > 1] for e in layouts]
    whole = [each for each in pairs if all(ring for _, ring in each)]
    return min(
        max((k / (8 if ring and k >= least else 4) for k, ring in each), default=0.25)
        for each in whole or pairs or [[(chips, False)]]
    )


@functools.cache
def _num_links(topology: TopologyShape, group: int) -> float:
    """Returns the number of a device's links that a group of this size uses, 1 or more."""
    least, sizes = TORI[topology.accelerator.name].min_ring, _sides(topology)
    links = sum(2 if size >= least else 1 for size in sizes)
    devices = max(math.prod(sizes), 2)
    return max(1.0, links * min(math.log(max(group, 1)) / math.log(devices), 1.0))
