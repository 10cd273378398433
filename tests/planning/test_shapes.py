"""What a topology's name says."""

import pytest

from moelib.planning.shapes import describe
from moelib.planning.topologies import PlanError


@pytest.mark.parametrize(
    ("name", "kind", "slices", "devices"),
    [
        ("v6e:2x2", "v6e", 1, 4),
        ("v5p:4x4x4", "v5p", 1, 64),
        ("tpu7x:2x2x1", "tpu7x", 1, 8),  # Two devices a chip.
        ("2*v6e:4x4", "v6e", 2, 16),
        ("h100:2x8", "h100", 2, 8),
    ],
)
def test_a_name_says_slices_and_devices(name, kind, slices, devices):
    shape = describe(name)
    assert shape.accelerator.name == kind
    assert (shape.num_slices, shape.devices_per_slice) == (slices, devices)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v6x:2x2", "no accelerator 'v6x'.*did you mean 'v6e'"),
        ("v6e", "write accelerator:shape, such as v6e:2x2"),
        ("h100:16", "write h100:HOSTSxGPUS with at most 8 GPUs a host"),
        ("h100:1x16", "with at most 8 GPUs a host"),
    ],
)
def test_what_is_no_topology_is_refused(name, message):
    with pytest.raises(PlanError, match=message):
        describe(name)
