"""Traffic of collectives, compared with closed forms."""

import pytest

from moelib.planning.estimate.candidates import Mesh
from moelib.planning.estimate.links import Links
from moelib.planning.hardware.topologies import describe


def test_a_gather_receives_all_but_its_own_part():
    topology = describe("h100:1x8")
    sent = Links(topology, Mesh((("fsdp", 8),))).all_gather(("fsdp",), 8e9)
    assert (sent.links_bytes, sent.network_bytes) == (7e9, 0)
    assert sent.links_seconds == pytest.approx(7e9 / topology.accelerator.link_bytes_per_second)


def test_an_all_reduce_is_a_scatter_and_a_gather():
    links = Links(describe("h100:1x8"), Mesh((("data", 8),)))
    assert links.all_reduce(("data",), 8e9).links_bytes == 2 * 7e9


def test_across_hosts_each_device_sends_its_share_once():
    links = Links(describe("h100:4x8"), Mesh((("fsdp", 8),), (("fsdp", 4),)))
    sent = links.all_gather(("fsdp",), 32e9)
    assert sent.network_bytes == 3e9  # Parts of 1 GB, of the like devices of three other hosts.
    assert sent.links_bytes == 28e9
    # Of 31 devices 7 are of the same host.
    sent = links.all_to_all(("fsdp",), 32e9)
    assert (sent.links_bytes, sent.network_bytes) == (7e9, 24e9)


def test_a_ring_over_several_hosts_passes_all_bytes_through_the_network():
    links = Links(describe("h100:1x8"), Mesh((("seq", 4), ("model", 2))))
    sent = links.ring(("seq",), 4e9)
    assert (sent.links_bytes, sent.network_bytes) == (4e9, 0.0)
    sent = Links(describe("h100:2x8"), Mesh((("seq", 8),), (("seq", 2),))).ring(("seq",), 4e9)
    assert (sent.links_bytes, sent.network_bytes) == (4e9, 4e9)
    links = Links(describe("h100:2x8"), Mesh((("expert", 8),), (("pipeline", 2),)))
    sent = links.ring(("pipeline",), 4e9)  # The other rank is on the other host.
    assert (sent.links_bytes, sent.network_bytes, sent.links_seconds) == (0.0, 4e9, 0.0)


@pytest.mark.parametrize(
    ("name", "sizes", "axes", "num_links"),
    [
        ("v6e:2x2", {"expert": 2, "fsdp": 2}, ("fsdp",), 1),
        ("v6e:2x2", {"fsdp": 4}, ("fsdp",), 2),
        ("v6e:16x16", {"expert": 16, "fsdp": 16}, ("expert",), 2),  # A ring.
        ("v6e:16x16", {"fsdp": 256}, ("fsdp",), 4),
        ("v5p:4x4x4", {"fsdp": 64}, ("fsdp",), 6),
        ("v6e:8x8", {"expert": 8, "fsdp": 8}, ("fsdp",), 1),  # A line.
        # Two lines of 4 on a side of 8; pairs at a distance of 4, four of which share its links.
        ("v6e:8x8", {"expert": 2, "fsdp": 32}, ("fsdp",), 2),
        ("v6e:8x8", {"expert": 2, "fsdp": 32}, ("expert",), 1 / 4),
        ("v6e:8x8", {"expert": 2, "fsdp": 32}, ("expert", "fsdp"), 2),
        # On a side of 4, a ring: both ways.
        ("v5p:4x4x4", {"expert": 2, "fsdp": 32}, ("expert",), 2 / 2),
        ("v5p:4x4x4", {"expert": 2, "fsdp": 32}, ("fsdp",), 2 + 2 + 1),
    ],
)
def test_axes_have_the_links_of_their_parts_of_the_torus(name, sizes, axes, num_links):
    topology = describe(name)
    dims = 3 if name.startswith("v5p") else 2
    one_way = topology.accelerator.link_bytes_per_second / (2 * dims)
    links = Links(topology, Mesh(tuple(sizes.items())))
    assert links.bytes_per_second(axes) == pytest.approx(num_links * one_way)


@pytest.mark.parametrize(
    ("name", "over_a_link"),
    # Half of what half of the devices send crosses the middle of the longest dimension: all of it
    # over the links there, of which a ring is cut twice.
    [
        ("v6e:4x4", 8 / 2 / 4),
        ("v6e:8x8", 32 / 2 / 8),
        ("v6e:16x16", 128 / 2 / (2 * 16)),
        ("v6e:4x8", 16 / 2 / 4),
        ("v5p:4x4x4", 32 / 2 / (2 * 16)),
        ("v5p:2x2x2", 4 / 2 / 4),
    ],
)
def test_an_all_to_all_takes_as_long_as_the_middle_of_its_slice(name, over_a_link):
    topology = describe(name)
    links = Links(topology, Mesh((("expert", topology.num_devices),)))
    dims = 3 if name.startswith("v5p") else 2
    of_one = topology.accelerator.link_bytes_per_second / (2 * dims)
    seconds = links.all_to_all(("expert",), 1e9).links_seconds
    assert seconds == pytest.approx(over_a_link * 1e9 / of_one)


@pytest.mark.parametrize(
    ("name", "outer", "inner", "of_chips"),
    # Which axis the two devices of a chip are along, in meshes that JAX makes of libtpu's devices.
    [
        ("tpu7x:2x2x1", 2, 4, "inner"),
        ("tpu7x:2x2x1", 4, 2, "inner"),
        ("tpu7x:4x4x4", 2, 64, "outer"),
        ("tpu7x:4x4x4", 16, 8, "inner"),
        ("tpu7x:4x4x4", 8, 16, "outer"),
    ],
)
def test_devices_of_a_chip_share_gathered_bytes(name, outer, inner, of_chips):
    links = Links(describe(name), Mesh((("expert", outer), ("fsdp", inner))))
    for axis, which, size in (("expert", "outer", outer), ("fsdp", "inner", inner)):
        received = 8e9 * (size - 1) / size
        expected = received / 2 if which == of_chips else received
        assert links.all_gather((axis,), 8e9).links_bytes == pytest.approx(expected)
