"""Trees are compared leaf by leaf; the first that differs is named with both values."""

import jax.numpy as jnp
import numpy as np
import pytest

from moelib.verify.compare import first_bit_difference, first_difference


def test_equal_trees_have_no_difference():
    tree = {"a": {"b": np.arange(4.0)}, "c": 1.0}
    assert first_difference(tree, tree, relative=0.0) is None


def test_the_entry_that_differs_most_is_named_with_both_values():
    want = {"a": np.ones((2, 3), np.float32), "b": np.zeros(2, np.float32)}
    got = {"a": want["a"].copy(), "b": want["b"]}
    got["a"][1, 2], got["a"][0, 0] = 1.5, 1.25
    found = first_difference(want, got, relative=1e-3)
    assert found is not None
    assert (found.leaf, found.index, found.expected, found.found) == ("a", (1, 2), 1.0, 1.5)
    assert (found.error, found.entries) == (0.5, (2, 6))
    assert "a[1, 2] is 1.5, expected 1: error 0.5" in str(found)


@pytest.mark.parametrize(("error", "differs"), [(9e-6, False), (2e-5, True)])
def test_the_allowed_error_is_relative_to_the_largest_entry(error, differs):
    want = {"a": np.array([2.0, 0.0])}
    got = {"a": np.array([2.0, 2.0 * error])}
    assert (first_difference(want, got, relative=1e-5) is not None) == differs


def test_a_floor_allows_cancellation():
    assert first_difference({"a": 0.0}, {"a": 1e-8}, relative=1e-5, floor=1e-7) is None


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_finite_on_one_side_only_differ(bad):
    want, got = {"a": np.ones(2)}, {"a": np.array([1.0, bad])}
    assert first_difference(want, got, relative=1.0) is not None
    assert first_difference(got, want, relative=1.0) is not None
    assert first_difference(got, got, relative=0.0) is None


def test_one_bit_is_a_difference():
    one = jnp.ones(3, jnp.bfloat16)
    assert first_bit_difference({"a": one}, {"a": one}) is None
    next_one = jnp.asarray([1, 1, 1.0078125], jnp.bfloat16)
    found = first_bit_difference({"a": one}, {"a": next_one})
    assert found is not None
    assert found.index == (2,)


def test_bits_are_compared_of_equal_values_too():
    yes = np.array([True, False])
    assert first_bit_difference({"a": yes}, {"a": yes.copy()}) is None
    assert first_bit_difference({"a": yes}, {"a": ~yes}) is not None
    with pytest.raises(ValueError, match=r"^a: .* bits"):
        first_bit_difference({"a": np.zeros(1)}, {"a": -np.zeros(1)})
    with pytest.raises(ValueError, match=r"^a: .*float64.*float32"):
        first_bit_difference({"a": np.zeros(1, np.float32)}, {"a": np.zeros(1)})


def test_whole_numbers_are_compared_as_such():
    large = np.array([2**31 - 1], np.int32)
    assert first_bit_difference({"a": large}, {"a": large - 1}) is not None


def test_trees_with_different_leaves_are_refused():
    with pytest.raises(ValueError, match=r"^b: "):
        first_difference({"a": 1.0}, {"a": 1.0, "b": 2.0}, relative=1.0)
    with pytest.raises(ValueError, match=r"^a: .*\(3,\).*\(2,\)"):
        first_difference({"a": np.ones(2)}, {"a": np.ones(3)}, relative=1.0)
