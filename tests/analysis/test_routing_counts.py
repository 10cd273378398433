"""Statistics of planted routings, against arithmetic."""

import math
from typing import Any

import numpy as np
import pytest

from moelib.analysis import routing_counts as counts

# Six tokens of ids 0, 0, 0, 1, 1, 2; the last is padding. Expert 3 of four has no token.
IDS = np.array([[0, 1], [0, 1], [0, 2], [2, 1], [1, 2], [4, 4]], np.uint8)
TOKENS = np.array([0, 0, 0, 1, 1, 2], np.uint8)


def test_load_and_its_violation():
    load = counts.load(IDS, 4)
    assert load.tolist() == [3, 4, 3, 0]
    assert counts.load_violation(load) == pytest.approx(4 / 2.5 - 1)
    assert counts.load_violation(np.array([5, 5])) == 0
    assert counts.load_violation(np.array([8, 0, 0, 0])) == 3  # E - 1.
    assert math.isnan(counts.load_violation(np.zeros(4)))


def test_overlap_counts_the_common_experts_of_the_best_k():
    other = np.array([[0, 1], [1, 0], [3, 0], [2, 1], [3, 0], [4, 4]], np.uint8)
    # k = 1: tokens 0 and 3. k = 2: 2 + 2 + 1 + 2 + 0. Padding has nothing in common.
    assert counts.overlap(IDS, other, 4).tolist() == [2, 7]
    assert counts.overlap(IDS, IDS, 4).tolist() == [5, 10]


@pytest.mark.parametrize("shape", [(3, 1), (1, 3)])  # Transposed without a copy.
def test_no_expert_equals_no_other_and_the_ids_are_not_changed(shape):
    ids = np.full(shape, 4, np.uint8)
    assert not counts.overlap(ids, ids, 4).any()
    assert (ids == 4).all()


def test_assignments_among_the_best_k_are_counted_without_no_expert():
    assert counts.assignments(IDS, 4).tolist() == [5, 10]
    assert counts.assignments(np.array([[4, 0], [1, 4]], np.uint8), 4).tolist() == [1, 2]


def test_coactivation_is_directional():
    together = counts.coactivation(IDS, 4)
    assert together.tolist() == [[3, 2, 1, 0], [2, 4, 2, 0], [1, 2, 3, 0], [0, 0, 0, 0]]
    probabilities = counts.conditional(together)
    assert probabilities[0, 1] == pytest.approx(2 / 3)
    assert probabilities[1, 0] == pytest.approx(2 / 4)
    assert np.isnan(probabilities[3]).all()  # No token: no probability, and not 0.


def test_specialization_is_the_share_of_a_token_ids_occurrences():
    shares = counts.specialization(IDS, TOKENS, 4, 5, min_count=2)
    assert shares[0, :2].tolist() == [1, 0]
    assert shares[1, :2].tolist() == pytest.approx([2 / 3, 1])
    assert shares[2, :2].tolist() == pytest.approx([1 / 3, 1])
    assert np.isnan(shares[:, 2:]).all()  # One occurrence, and none.
    assert counts.best_tokens(shares, 2) == [[0], [1, 0], [1, 0], []]


def test_experts_of_other_tokens_are_refused():
    """Experts in the order [S, B, K] are not those of tokens in the order [B, S]."""
    ids = IDS.reshape(2, 3, 2)
    with pytest.raises(ValueError, match=r"\(3, 2, 2\)"):
        counts.specialization(ids.swapaxes(0, 1), TOKENS, 4, 5)


@pytest.mark.parametrize("num_tokens", [1, 70_000])
def test_permuting_tokens_changes_nothing(num_tokens):
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((num_tokens, 8)), 1)[:, :3].astype(np.uint8)
    other = np.argsort(rng.random((num_tokens, 8)), 1)[:, :3].astype(np.uint8)
    tokens = rng.integers(0, 9, num_tokens)
    order = rng.permutation(num_tokens)
    cases: list[tuple[Any, Any]] = [
        (lambda a: counts.load(a, 8), (ids,)),
        (lambda a: counts.coactivation(a, 8), (ids,)),
        (lambda a, b: counts.overlap(a, b, 8), (ids, other)),
        (lambda a, b: counts.specialization(a, b, 8, 9), (ids, tokens)),
    ]
    for function, arrays in cases:
        permuted = [array[order] for array in arrays]
        np.testing.assert_array_equal(function(*arrays), function(*permuted))


def test_numbers_that_are_not_finite_are_null():
    assert counts.as_json(np.array([[1 / 3, np.nan], [np.inf, 2]])) == [[0.33333, None], [None, 2]]
