"""Deep deterministic policy gradients swing the pendulum up."""

import jax
import numpy as np
import pytest

pytest.importorskip("gymnasium")

from experiments.tasks import ddpg


def test_policy_and_critic_have_gradients_of_their_own_losses():
    params = ddpg.init(jax.random.key(0))
    batch = ddpg.play(None, num_envs=1, seed=0)

    def parts(trained):
        (objective, metrics), changed = ddpg.loss({**params, "trained": trained}, batch, None, True)
        return (objective, metrics["error"], metrics["value"]), changed["target"]

    gradients, target = jax.jit(jax.jacrev(parts, has_aux=True))(params["trained"])
    objective, error, value = gradients
    equal = lambda a, b: jax.tree.map(np.testing.assert_array_equal, a, b)
    equal(objective["critic"], error["critic"])
    equal(objective["policy"], jax.tree.map(lambda x: -x, value["policy"]))
    assert np.any(value["policy"][0]["weight"])
    equal(target, params["target"])  # The average of two equal networks.


def test_examples_are_transitions_that_were_played(monkeypatch):
    monkeypatch.setattr(ddpg, "NUM_STEPS", 5)
    examples, collate = ddpg.replay_buffer()
    params = jax.tree.map(np.asarray, ddpg.init(jax.random.key(0)))
    examples(0, params)
    chosen = examples(1, params)
    assert chosen.max() == 2 * 5 * ddpg.NUM_ENVS - 1
    batch = collate(list(range(2 * 5 * ddpg.NUM_ENVS)))
    # Each epoch starts new episodes; within one, a step starts where the last one ended.
    steps = {name: x.reshape(2, 5, ddpg.NUM_ENVS, -1) for name, x in batch.items()}
    np.testing.assert_array_equal(steps["next"][:, :-1], steps["observation"][:, 1:])
    assert not np.array_equal(steps["next"][0, -1], steps["observation"][1, 0])


def test_ddpg_trains(tmp_path, monkeypatch):
    monkeypatch.setattr(ddpg, "UPDATES_PER_EPOCH", 5)
    monkeypatch.setattr(ddpg, "NUM_STEPS", 50)
    assert -1000 < ddpg.run(str(tmp_path), num_epochs=2)["return"] < 0


@pytest.mark.slow
def test_ddpg(tmp_path):
    assert ddpg.run(str(tmp_path))["return"] > -250
