"""Proximal policy optimization balances the pole."""

import jax
import numpy as np
import pytest

pytest.importorskip("gymnasium")

from experiments.tasks import ppo


def test_returns_without_decay_are_sums_of_discounted_rewards(monkeypatch):
    monkeypatch.setattr(ppo, "TRACE_DECAY", 1.0)
    params = jax.tree.map(np.asarray, ppo.init(jax.random.key(0)))
    examples = ppo.Rollouts()(0, params)
    rows = examples[: ppo.NUM_ENVS * ppo.NUM_STEPS : ppo.NUM_ENVS]  # Those of one environment.
    ends = [t for t, row in enumerate(rows) if row["weight"] == 0]  # An episode ended before.
    assert len(ends) > 1
    for t in range(ends[0] + 1, ends[1]):
        left = ends[1] - t  # Rewards of 1 until the pole falls.
        expected = (1 - ppo.DISCOUNT**left) / (1 - ppo.DISCOUNT)
        assert rows[t]["return"] == pytest.approx(expected, rel=1e-5)


def test_ppo_learns(tmp_path):
    assert ppo.run(str(tmp_path), num_epochs=2)["return"] > 50  # At random, 22.


@pytest.mark.slow
def test_ppo(tmp_path):
    assert ppo.run(str(tmp_path))["return"] > 450
