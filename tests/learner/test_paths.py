import pytest

from moelib.core.param import FanAxes, ParameterSpec
from moelib.learner import paths

PARAMS = {"a": {"w": 1, "b": {"x": 2}}, "c": 3}


def test_parts_merge_to_the_whole():
    some = paths.select(PARAMS, lambda path: path in ("a/b/x", "c"))
    rest = paths.select(PARAMS, lambda path: path == "a/w")
    assert some == {"a": {"b": {"x": 2}}, "c": 3}
    assert rest == {"a": {"w": 1}}
    assert paths.merge({}, some, rest) == PARAMS


def test_merge_replaces_and_changes_no_input():
    base = {"a": {"w": 1, "v": 2}}
    assert paths.merge(base, {"a": {"w": 5}}) == {"a": {"w": 5, "v": 2}}
    assert base == {"a": {"w": 1, "v": 2}}


def test_leaves_by_path():
    assert paths.by_path(PARAMS) == {"a/w": 1, "a/b/x": 2, "c": 3}
    assert paths.map_by_path(lambda path, x: f"{path}={x}", PARAMS)["a"]["b"]["x"] == "a/b/x=2"


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
    assert paths.batch_axes(spec) == batch
