"""Trees by path, and the record of a checkpoint."""

from typing import NamedTuple

import numpy as np

from moelib.checkpoint import contents


class Pair(NamedTuple):
    a: object
    b: object


def test_any_tree_goes_through_nested_dicts():
    tree = Pair({"x": np.ones(2), "none": None}, [np.zeros(3), (), Pair(np.ones(1), {})])
    nested = contents.to_nested(tree)
    assert nested.keys() == {"a", "b"}
    assert nested["b"].keys() == {"0", "2"}
    back = contents.from_nested(nested, tree)
    assert isinstance(back.b[2], Pair)
    np.testing.assert_array_equal(back.a["x"], tree.a["x"])


def test_record_describes_arrays_and_libraries():
    assert contents.describe_arrays({"w": np.ones((2, 3), np.float32)}) == {
        "w": ["float32", [2, 3]]
    }
    assert {"python", "jax", "orbax-checkpoint"} <= contents.library_versions().keys()
