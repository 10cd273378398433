"""Links: the traffic of a collective along mesh axes, and its time at the links' peak rate.

A collective over several slices is split in two: inside a slice it uses links (ICI, NVLink), and
between slices the network (DCN, InfiniBand), which each byte crosses once.

On a torus a device has two neighbors along each dimension, or one where the dimension has size 2 or
is a line. The devices of a group lie where `create_device_mesh` puts them: axes that share a side
of the torus have parts of it: lines, or every second, third, ... device, so that several
groups share its links. Messages of an all-to-all cross several links.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moelib.parallel.mesh import create_device_mesh, torus_spans
from moelib.planning.estimate.candidates import Mesh
from moelib.planning.hardware.topologies import TORI, TopologyShape, torus_devices


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

    def __init__(
        self, topology: TopologyShape, mesh: Mesh, devices: np.ndarray | None = None
    ) -> None:
        """Takes the topology, the mesh, and the devices of a slice as `create_device_mesh` does."""
        self._topology, self._mesh, self._given = topology, mesh, devices

    def _group(self, axes: Sequence[str]) -> tuple[int, int]:
        """Returns the size of a group of devices along some axes: (inside a slice, slices)."""
        inside = math.prod(self._mesh.inside.get(axis, 1) for axis in axes)
        return inside, math.prod(self._mesh.across.get(axis, 1) for axis in axes)

    @functools.cached_property
    def _devices(self) -> np.ndarray:
        """The devices of a slice, with a dimension per axis of its mesh; none for GPUs."""
        if self._given is not None:
            return self._given
        devices = torus_devices(self._topology)
        sizes = self._mesh.inside
        if not devices:
            return np.empty(0)
        return create_device_mesh([*sizes.values()], [*sizes], devices).devices

    @functools.cache  # noqa: B019 (one instance per mesh, as long as its estimates)
    def _spans(self, axes: tuple[str, ...]) -> list["_Span"]:
        """Returns the parts of the torus's sides that a group along some axes spans, in chips."""
        least = TORI[self._topology.accelerator.name].min_ring
        names = [*self._mesh.inside]
        sides = [size for size, _ in torus_spans(self._devices, names, names)[:-2]]
        spans = torus_spans(self._devices, names, axes)[:-2]
        found = [
            _Span(size * stride, stride, ring=size * stride == side >= least)
            for side, (size, stride) in zip(sides, spans, strict=True)
            if size > 1
        ]
        chips = self._group(axes)[0] // self._devices_per_chip(axes)
        winds = math.prod(size for size, _ in spans) != chips
        return [_Span(chips, 1, ring=False)] if winds else found

    def _devices_per_chip(self, axes: Sequence[str]) -> int:
        """Returns the number of devices of one chip in a group."""
        spans = torus_spans(self._devices, [*self._mesh.inside], axes) if self._is_torus else []
        return spans[-2][0] if spans else 1

    @functools.cache  # noqa: B019 (one instance per mesh, as long as its estimates)
    def used(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Returns names of the links that a group along some axes uses, by the axes along them.

        Collectives with a name in common wait for each other. Those of a torus are its sides; all
        devices of a domain of GPUs share a switch.
        """
        inside, across = self._group(axes)
        network = ("network",) if across > 1 else ()
        if not self._is_torus:
            return (*(("links",) if inside > 1 else ()), *network)
        names = [*self._mesh.inside]
        along = {name: torus_spans(self._devices, names, (name,))[:-2] for name in names}
        spans = enumerate(torus_spans(self._devices, names, axes)[:-2])
        sides = [i for i, (size, _) in spans if size > 1]
        found = ["links of " + " ".join(n for n in names if along[n][i][0] > 1) for i in sides]
        return (*found, *network)

    def all_gather(self, axes: Sequence[str], num_bytes: float) -> Traffic:
        """Returns the traffic of an all-gather by bytes of its result; also of a reduce-scatter."""
        inside, across = self._group(axes)
        links = num_bytes * (inside - 1) / inside
        # Devices of a chip each receive part of what both need, and pass it on inside the chip.
        links /= self._devices_per_chip(axes)
        return self._traffic(axes, links, num_bytes / inside * (across - 1) / across)

    def all_reduce(self, axes: Sequence[str], num_bytes: float) -> Traffic:
        """Returns the traffic of an all-reduce by bytes of its result."""
        return self.all_gather(axes, num_bytes).times(2.0)

    def all_to_all(self, axes: Sequence[str], num_bytes: float) -> Traffic:
        """Returns the traffic of an even all-to-all by bytes of a device's operand."""
        inside, across = self._group(axes)
        n = inside * across
        links, network = num_bytes * (inside - 1) / n, num_bytes * (n - inside) / n
        traffic = self._traffic(axes, links, network)
        if inside == 1 or not self._is_torus:
            return traffic
        # Half of what half of a side's chips send crosses its middle: a quarter of what they send,
        # over one link of a line, or two of a ring. The longest side takes longest.
        crossing = max(
            (x.chips / (8 if x.ring else 4) for x in self._spans(tuple(axes))), default=0.25
        )
        seconds = num_bytes * inside / n * crossing / self._bytes_per_second_of_link
        return dataclasses.replace(traffic, links_seconds=seconds)

    def ring(self, axes: Sequence[str], num_bytes: float) -> Traffic:
        """Returns the traffic of passing bytes on in a ring, by all that a device sends."""
        _, across = self._group(axes)
        return self._traffic(axes, num_bytes, num_bytes if across > 1 else 0.0)

    def _traffic(self, axes: Sequence[str], links: float, network: float) -> Traffic:
        accelerator = self._topology.accelerator
        seconds = links / self.bytes_per_second(axes) if links else 0.0
        return Traffic(links, network, seconds, network / accelerator.network_bytes_per_second)

    def bytes_per_second(self, axes: Sequence[str]) -> float:
        """Returns the peak rate from a device to the devices of its slice along some axes."""
        if not self._is_torus:
            return self._topology.accelerator.link_bytes_per_second  # A switch connects all.
        links = sum((2 if x.ring else 1) / x.stride for x in self._spans(tuple(axes)))
        return self._bytes_per_second_of_link * (links or 1.0)

    @property
    def _is_torus(self) -> bool:
        return self._topology.accelerator.platform == "tpu"

    @property
    def _bytes_per_second_of_link(self) -> float:
        accelerator = self._topology.accelerator
        return accelerator.link_bytes_per_second / (2 * TORI[accelerator.name].num_dimensions)


class _Span(NamedTuple):
    """The part of a side of the torus that a group of devices spans."""

    chips: int  # Length, with those of other groups in between.
    stride: int  # Number of groups that share its links.
    ring: bool
