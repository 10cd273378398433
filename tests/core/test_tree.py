from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core import tree
from moelib.core.param import ParameterSpec

TREE = {
    "decoder": {"layer0": {"weight": np.ones((2, 3), np.float32), "bias": np.ones(3, jnp.bfloat16)}}
}
NUMBERS = {"a": {"w": 1, "b": {"x": 2}}, "c": 3}
PATHS = ["decoder/layer0/bias", "decoder/layer0/weight"]


def test_leaves_are_listed_by_path():
    assert [path for path, _ in tree.flatten_items(TREE)] == PATHS
    assert [path for path, _ in tree.flatten_items([{"a": 1}, (2,)])] == ["0/a", "1/0"]
    assert tree.by_path(NUMBERS) == {"a/w": 1, "a/b/x": 2, "c": 3}
    assert tree.map_by_path(lambda path, x: f"{path}={x}", NUMBERS)["a"]["b"]["x"] == "a/b/x=2"


class Pair(NamedTuple):
    """Any tree that is no dict."""

    a: object
    b: object


def test_any_tree_goes_through_nested_dicts():
    made = Pair({"x": np.ones(2), "none": None}, [np.zeros(3), (), Pair(np.ones(1), {})])
    nested = tree.to_nested(made)
    assert nested.keys() == {"a", "b"}
    assert nested["b"].keys() == {"0", "2"}
    back = tree.from_nested(nested, made)
    assert isinstance(back.b[2], Pair)
    np.testing.assert_array_equal(back.a["x"], made.a["x"])


def test_trees_that_differ_are_compared_by_shapes_and_kinds_of_numbers():
    arrays = {"a": [np.ones(2), np.zeros(3, np.int32)]}
    assert tree.mismatch({"a": [np.ones(2, jnp.bfloat16), np.zeros(3, np.int8)]}, arrays) is None
    for found, text in (
        ({"a": [np.ones(2), np.zeros(3, np.float32)]}, "'a/1' is float32[3] instead of int32[3]"),
        ({"a": [np.ones(3), np.zeros(3, np.int32)]}, "'a/0' is float64[3] instead of float64[2]"),
        ({"a": [np.ones(2)]}, "'a/1' is missing instead of int32[3]"),
        ({**arrays, "b": 1.5}, "'b' is 1.5 instead of missing"),
        ("text", "'a/0' is missing instead of float64[2]"),
    ):
        assert tree.mismatch(found, arrays) == text


def test_the_first_rule_that_matches_a_whole_path_decides():
    rules = [(r".*/bias", 0), (r"decoder/.*", (1, 2))]
    chosen = tree.match_rules(PATHS, rules, default=None, field="decay")
    assert chosen == {"decoder/layer0/bias": 0, "decoder/layer0/weight": (1, 2)}
    chosen = tree.match_rules(PATHS, rules[:1], default=5, field="decay")
    assert chosen["decoder/layer0/weight"] == 5


@pytest.mark.parametrize(
    ("rules", "named"),
    [
        ([("bias", 0)], "decay.*'bias'"),
        ([("decoder/layer0/bais", 0)], "decay.*'decoder/layer0/bias'"),  # The nearest path.
        ([(".*", 0), (".*/bias", 1)], r"decay.*'\.\*/bias' applies .* the rule '\.\*' before"),
    ],
)
def test_a_rule_that_decides_for_nothing_is_an_error(rules, named):
    with pytest.raises(ValueError, match=named):
        tree.match_rules(PATHS, rules, default=None, field="decay")


def test_elements_and_bytes_are_counted_of_arrays_and_specs():
    assert tree.count_elements(TREE) == 9
    assert tree.count_bytes(TREE) == 6 * 4 + 3 * 2
    specs = {"w": ParameterSpec((4, 2), (None, None), dtype="bfloat16")}
    assert tree.count_elements(specs) == 8
    assert tree.count_bytes(specs) == 16
    assert tree.count_elements({}) == 0


def test_parts_merge_to_the_whole():
    some = tree.select(NUMBERS, lambda path: path in ("a/b/x", "c"))
    rest = tree.select(NUMBERS, lambda path: path == "a/w")
    assert some == {"a": {"b": {"x": 2}}, "c": 3}
    assert rest == {"a": {"w": 1}}
    assert tree.merge({}, some, rest) == NUMBERS


def test_merge_replaces_and_changes_no_input():
    base = {"a": {"w": 1, "v": 2}}
    assert tree.merge(base, {"a": {"w": 5}}) == {"a": {"w": 5, "v": 2}}
    assert base == {"a": {"w": 1, "v": 2}}
