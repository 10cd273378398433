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
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from moelib.parallel.mesh import create_device_mesh, torus_spans
from moelib.planning.estimate.candidates import Mesh
from moelib.planning.hardware.topologies import TORI, TopologyShape, torus_devices


@dataclasses.dataclass(slots=True)  # A sweep creates a million; frozen ones take twice as long.
class Traffic:
    """Bytes that one device sends, and the seconds that takes at the peak rate."""

    links_bytes: float = 0.0  # To devices of its slice.
    network_bytes: float = 0.0  # To other slices.
    links_seconds: float = 0.0
    network_seconds: float = 0.0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.links_bytes + other.links_bytes,
            self.network_bytes + other.network_bytes,
            self.links_seconds + other.links_seconds,
            self.network_seconds + other.network_seconds,
        )

    def times(self, factor: float) -> "Traffic":
        """Returns the traffic times a factor."""
        return Traffic(
            self.links_bytes * factor,
            self.network_bytes * factor,
            self.links_seconds * factor,
            self.network_seconds * factor,
        )


class Layout:
    """The devices of a slice's torus, with a dimension per size of a mesh; none for GPUs."""

    def __init__(
        self, topology: TopologyShape, sizes: tuple[int, ...], laid: np.ndarray | None = None
    ) -> None:
        """Lays the devices as `create_device_mesh` does, or takes those `laid` already."""
        self._names = tuple(map(str, range(len(sizes))))
        devices = torus_devices(topology) if laid is None else []
        self._devices = laid
        if devices:
            self._devices = create_device_mesh(sizes, self._names, devices).devices
        self.spans = functools.cache(self._spans)

    def _spans(self, dims: tuple[int, ...]) -> list[tuple[int, int]]:
        """Returns the spans of a group along some dimensions; see `torus_spans`."""
        if self._devices is None:
            return []
        return torus_spans(self._devices, self._names, [self._names[dim] for dim in dims])


class Links:
    """The links of a topology, as a mesh uses them."""

    def __init__(
        self,
        topology: TopologyShape,
        mesh: Mesh,
        layout: Callable[[TopologyShape, tuple[int, ...]], Layout] = Layout,
    ) -> None:
        """Initializes the links; meshes of equal sizes share what a cached `layout` returns."""
        self._accelerator, self._mesh = topology.accelerator, mesh
        self._is_torus = topology.accelerator.platform == "tpu"
        self._layout = layout(topology, tuple(mesh.inside.values()))
        self._group = functools.cache(self._group_along)

    def _group_along(self, axes: tuple[str, ...]) -> "_Group":
        """Returns the group of devices along some axes."""
        inside = math.prod(self._mesh.inside.get(axis, 1) for axis in axes)
        across = math.prod(self._mesh.across.get(axis, 1) for axis in axes)
        if not self._is_torus:  # A switch connects all.
            return _Group(inside, across, 1, [], self._accelerator.link_bytes_per_second)
        names = [*self._mesh.inside]
        *sides, _, _ = self._layout.spans(tuple(range(len(names))))
        *spans, (of_chip, _), _ = self._layout.spans(
            tuple(dim for dim, name in enumerate(names) if name in axes)
        )
        least, chips = TORI[self._accelerator.name].min_ring, inside // of_chip
        parts = [
            _Span(size * stride, stride, ring=size * stride == side >= least)
            for (side, _), (size, stride) in zip(sides, spans, strict=True)
            if size > 1
        ]
        if math.prod(size for size, _ in spans) != chips:  # It winds through the torus.
            parts = [_Span(chips, 1, ring=False)]
        links = sum((2 if x.ring else 1) / x.stride for x in parts)
        return _Group(inside, across, of_chip, parts, self._bytes_per_second_of_link * (links or 1))

    def used(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Returns names of the links that a group along some axes uses, by the axes along them.

        Collectives with a name in common wait for each other. Those of a torus are its sides; all
        devices of a domain of GPUs share a switch.
        """
        group, names = self._group(axes), [*self._mesh.inside]
        network = ("network",) if group.across > 1 else ()
        if not self._is_torus:
            return (*(("links",) if group.inside > 1 else ()), *network)
        along = [self._layout.spans((dim,))[:-2] for dim in range(len(names))]
        spans = self._layout.spans(tuple(i for i, name in enumerate(names) if name in axes))[:-2]
        sides = (
            "links of " + " ".join(n for n, x in zip(names, along, strict=True) if x[i][0] > 1)
            for i, (size, _) in enumerate(spans)
            if size > 1
        )
        return (*dict.fromkeys(sides), *network)

    def all_gather(self, axes: tuple[str, ...], num_bytes: float) -> Traffic:
        """Returns the traffic of an all-gather by bytes of its result; also of a reduce-scatter."""
        group = self._group(axes)
        inside, across = group.inside, group.across
        links = num_bytes * (inside - 1) / inside
        # Devices of a chip each receive part of what both need, and pass it on inside the chip.
        links /= group.of_chip
        return self._traffic(group, links, num_bytes / inside * (across - 1) / across)

    def all_reduce(self, axes: tuple[str, ...], num_bytes: float) -> Traffic:
        """Returns the traffic of an all-reduce by bytes of its result."""
        return self.all_gather(axes, num_bytes).times(2.0)

    def all_to_all(self, axes: tuple[str, ...], num_bytes: float) -> Traffic:
        """Returns the traffic of an even all-to-all by bytes of a device's operand."""
        group = self._group(axes)
        inside, n = group.inside, group.inside * group.across
        links, network = num_bytes * (inside - 1) / n, num_bytes * (n - inside) / n
        traffic = self._traffic(group, links, network)
        if inside == 1 or not self._is_torus:
            return traffic
        # Half of what half of a side's chips send crosses its middle: a quarter of what they send,
        # over one link of a line, or two of a ring. The longest side takes longest.
        crossing = max((x.chips / (8 if x.ring else 4) for x in group.spans), default=0.25)
        seconds = num_bytes * inside / n * crossing / self._bytes_per_second_of_link
        return dataclasses.replace(traffic, links_seconds=seconds)

    def ring(self, axes: tuple[str, ...], num_bytes: float) -> Traffic:
        """Returns the traffic of passing bytes on in a ring, by all that a device sends."""
        group = self._group(axes)
        sizes = (num_bytes if size > 1 else 0.0 for size in (group.inside, group.across))
        return self._traffic(group, *sizes)

    def _traffic(self, group: "_Group", links: float, network: float) -> Traffic:
        seconds = links / group.bytes_per_second if links else 0.0
        return Traffic(
            links, network, seconds, network / self._accelerator.network_bytes_per_second
        )

    def bytes_per_second(self, axes: tuple[str, ...]) -> float:
        """Returns the peak rate from a device to the devices of its slice along some axes."""
        return self._group(axes).bytes_per_second

    @property
    def _bytes_per_second_of_link(self) -> float:
        accelerator = self._accelerator
        return accelerator.link_bytes_per_second / (2 * TORI[accelerator.name].num_dimensions)


class _Span(NamedTuple):
    """The part of a side of the torus that a group of devices spans."""

    chips: int  # Length, with those of other groups in between.
    stride: int  # Number of groups that share its links.
    ring: bool


class _Group(NamedTuple):
    """The devices that a collective joins, and their links."""

    inside: int  # Devices of a slice.
    across: int  # Slices.
    of_chip: int  # Devices of a chip.
    spans: list[_Span]
    bytes_per_second: float  # Peak rate from a device to others of its slice.
