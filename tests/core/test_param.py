import numpy as np
import pytest

from moelib.core.param import FanAxes, ParameterSpec, is_spec

EXPERTS = ParameterSpec(
    shape=(8, 4, 6), axes=("experts", "embed", "ffn"), fan_axes=FanAxes((1,), (2,), (0,))
)


def test_sizes_and_fans_are_counted():
    assert EXPERTS.size == 192
    assert EXPERTS.fans() == (4, 6)
    heads = ParameterSpec((4, 3, 2), ("embed", "heads", None), fan_axes=FanAxes((0,), (1, 2)))
    assert heads.fans() == (4, 6)


def test_a_stacked_spec_has_a_new_first_axis_and_the_same_fans():
    stacked = EXPERTS.stacked(5)
    assert stacked.shape == (5, 8, 4, 6)
    assert stacked.axes == ("layers", "experts", "embed", "ffn")
    assert stacked.fan_axes == FanAxes((2,), (3,), (0, 1))
    assert stacked.fans() == EXPERTS.fans()


@pytest.mark.parametrize(
    ("axes", "fan_axes", "named"),
    [
        (("embed",), None, r"shape \(2, 3\).*2 dimensions.*name 1"),
        ((None, None), FanAxes((0,), (-3,)), r"shape \(2, 3\).*dimension -3"),
        ((None, None), FanAxes((0,), (2,)), r"shape \(2, 3\).*dimension 2"),
        ((None, None), None, r"shape \(2, 3\).*fan_axes"),
    ],
)
def test_axes_that_are_not_those_of_the_dimensions_are_refused(axes, fan_axes, named):
    with pytest.raises(ValueError, match=named):
        ParameterSpec((2, 3), axes, fan_axes=fan_axes).fans()


def test_negative_fan_axes_count_from_the_last():
    spec = ParameterSpec((2, 3, 4), (None,) * 3, fan_axes=FanAxes((-2,), (-1,), (-3,)))
    assert spec.fan_axes == FanAxes((1,), (2,), (0,))
    assert FanAxes(in_axis=1, out_axis=2, batch_axis=0) == spec.fan_axes  # pyrefly: ignore
    assert spec.stacked(5).fans() == (3, 4)


def test_is_spec():
    assert is_spec(EXPERTS)
    assert not is_spec(np.ones(1))


@pytest.mark.parametrize(
    ("shape", "fan_axes", "batch"),
    [
        ((4, 6, 8), FanAxes((1,), (2,), (0,)), (0,)),
        ((6, 3, 2, 4), FanAxes((0,), (2, 3), (1,)), (1,)),
        ((5, 4, 6, 8), FanAxes((2,), (3,), (0,)), (0, 1)),
        ((6,), None, ()),
        ((9, 6), None, (0,)),  # The scale of a norm under a scan over 9 layers.
    ],
)
def test_batch_axes_are_those_of_independent_parameters(shape, fan_axes, batch):
    spec = ParameterSpec(shape, (None,) * len(shape), fan_axes=fan_axes)
    assert spec.batch_axes == batch
