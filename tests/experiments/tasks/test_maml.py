"""Meta-learning adapts to new problems."""

import jax
import numpy as np
import pytest

from experiments.tasks import maml


def test_adaptation_takes_steps_of_gradient_descent(monkeypatch):
    monkeypatch.setattr(maml, "NUM_STEPS", 1)
    params, problem = maml.init(jax.random.key(0)), maml.sines(1, seed=0)[0]
    adapted = jax.jit(maml.adapt)(params, problem["support"])
    step = lambda p, new: (np.asarray(p) - np.asarray(new)) / maml.STEP_SIZE
    change = jax.tree.leaves(jax.tree.map(step, params, adapted))
    slope = sum(np.sum(c**2) for c in change)  # Of the error along the gradient.
    tiny = jax.tree.map(lambda p, new: p + 1e-3 * (new - p), params, adapted)
    error = jax.jit(maml.error)
    fall = error(params, problem["support"]) - error(tiny, problem["support"])
    assert float(fall) == pytest.approx(1e-3 * maml.STEP_SIZE * slope, rel=0.05)


def test_maml_learns(tmp_path):
    found = maml.run(str(tmp_path), num_steps=20)
    assert found["after"] < 0.9 * found["before"]


@pytest.mark.slow
def test_maml(tmp_path):
    found = maml.run(str(tmp_path))
    assert found["before"] > 2
    assert found["after"] < 0.5
