"""What collectives send, against closed forms."""

import pytest

from moelib.planning.candidates import Mesh
from moelib.planning.links import Links, links_bytes_per_second
from moelib.planning.topologies import describe


def test_a_gather_receives_all_but_its_own_part():
    topology = describe("h100:1x8")
    sent = Links(topology, Mesh((("fsdp", 8),))).gathered(("fsdp",), 8e9)
    assert (sent.links_bytes, sent.network_bytes) == (7e9, 0)
    assert sent.links_seconds == pytest.approx(7e9 / topology.accelerator.link_bytes_per_second)


def test_an_all_reduce_is_a_scatter_and_a_gather():
    links = Links(describe("h100:1x8"), Mesh((("data", 8),)))
    assert links.reduced(("data",), 8e9).links_bytes == 2 * 7e9


def test_across_hosts_each_device_sends_its_share_once():
    links = Links(describe("h100:4x8"), Mesh((("fsdp", 8),), (("fsdp", 4),)))
    sent = links.gathered(("fsdp",), 32e9)
    assert sent.network_bytes == 3e9  # Parts of 1 GB, of the like devices of three other hosts.
    assert sent.links_bytes == 28e9
    # Of 31 devices 7 are of the same host.
    sent = links.exchanged(("fsdp",), 32e9)
    assert (sent.links_bytes, sent.network_bytes) == (7e9, 24e9)


def test_a_ring_passes_on_as_often_as_it_has_devices():
    links = Links(describe("h100:1x8"), Mesh((("seq", 4), ("model", 2))))
    assert links.passed(("seq",), 1e9).links_bytes == 4e9


def test_an_axis_of_a_torus_has_the_links_of_its_dimensions():
    four = describe("v6e:2x2")
    one_way = four.accelerator.link_bytes_per_second / 4  # Of two dimensions' links, one.
    assert links_bytes_per_second(four, 2) == pytest.approx(one_way)
    assert links_bytes_per_second(four, 4) == pytest.approx(2 * one_way)
    pod = describe("v6e:16x16")  # Rings.
    assert links_bytes_per_second(pod, 16) == pytest.approx(2 * one_way)
    assert links_bytes_per_second(pod, 256) == pytest.approx(4 * one_way)
