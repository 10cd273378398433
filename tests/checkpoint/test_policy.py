"""Policies: when they act, and which checkpoints stay."""

import itertools

import pytest

from moelib.checkpoint import policy


def acting(fn, last=12):
    return [step for step in range(1, last + 1) if fn(step=step)]


def test_every_n_steps():
    assert acting(policy.every_n_steps_policy(4)) == [4, 8, 12]
    assert acting(policy.every_n_steps_policy(4, min_step=5)) == [8, 12]


def test_every_n_steps_and_last():
    assert acting(policy.every_n_steps_and_last_policy(4, max_step=10)) == [4, 8, 10, 12]
    assert acting(policy.every_n_steps_and_last_policy(5)) == [5, 10]


def test_evenly_spaced_ends_with_the_last_step():
    fn = policy.evenly_spaced_policy(10, max_step=11029)
    steps = acting(fn, 11029)
    assert len(steps) == 10
    assert steps[-1] == 11029
    assert {b - a for a, b in itertools.pairwise(steps)} == {1102, 1103}


def test_settings_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="n=0"):
        policy.every_n_steps_policy(0)
    with pytest.raises(ValueError, match="max_step=None"):
        policy.evenly_spaced_policy(10)


METRICS = {10: 3.0, 20: 1.0, 30: None, 40: 2.0, 50: float("nan")}


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"keep_last_n": None}, {10, 20, 30, 40, 50}),
        ({"keep_last_n": 2}, {40, 50}),
        ({"keep_last_n": 0}, {50}),
        ({"keep_last_n": 1, "keep_every_n_steps": 20}, {20, 40, 50}),
        ({"keep_last_n": 1, "keep_best_n": 1}, {20, 50}),
        ({"keep_last_n": 1, "keep_best_n": 1, "best_mode": "max"}, {10, 50}),
        ({"keep_last_n": 1, "keep_best_n": 9}, {10, 20, 40, 50}),
    ],
)
def test_kept_steps(settings, kept):
    assert policy.steps_to_keep(METRICS, **settings) == kept
