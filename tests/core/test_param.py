import jax.numpy as jnp
import pytest

from moelib.core.errors import UserError
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


def test_axes_must_name_every_dimension():
    with pytest.raises(ValueError, match=r"shape \(2, 3\).*2 dimensions.*name 1"):
        ParameterSpec((2, 3), ("embed",))


@pytest.mark.parametrize("axis", [-3, 2])
def test_fan_axes_must_be_dimensions(axis: int):
    with pytest.raises(UserError, match=rf"shape \(2, 3\).*dimension {axis}"):
        ParameterSpec((2, 3), (None, None), fan_axes=FanAxes((0,), (axis,)))


def test_negative_fan_axes_count_from_the_last():
    spec = ParameterSpec((2, 3, 4), (None,) * 3, fan_axes=FanAxes((-2,), (-1,), (-3,)))
    assert spec.fan_axes == FanAxes((1,), (2,), (0,))
    assert spec.stacked(5).fans() == (3, 4)


def test_fans_need_fan_axes():
    with pytest.raises(UserError, match=r"shape \(3,\).*fan_axes"):
        ParameterSpec((3,), (None,)).fans()


def test_is_spec():
    assert is_spec(EXPERTS)
    assert not is_spec(jnp.ones(1))


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
