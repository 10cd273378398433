"""Meta-learning (MAML): a network that fits a new sine wave from ten points in a few steps.

python -m experiments.tasks.maml --trainer_dir=runs/sines

An example is a regression problem: points to fit ("support") and others to predict ("query").

Source: Finn et al., arXiv:1703.03400.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen

import moelib

from .command import run_as_command

NUM_POINTS, NUM_STEPS, STEP_SIZE = 10, 5, 0.03
NETWORK = linen.Sequential(
    [linen.Dense(40), linen.tanh, linen.Dense(40), linen.tanh, linen.Dense(1)]
)


def sines(count, seed):
    """Returns regression problems: sine waves of random amplitudes and phases."""
    rng = np.random.default_rng(seed)
    amplitude, phase = rng.uniform(0.1, 5, (count, 1, 1)), rng.uniform(0, np.pi, (count, 1, 1))
    x = rng.uniform(-5, 5, (count, 2 * NUM_POINTS, 1)).astype(np.float32)
    y = (amplitude * np.sin(x - phase)).astype(np.float32)
    points = lambda i, part: {"x": x[i, part], "y": y[i, part]}
    support, query = slice(NUM_POINTS), slice(NUM_POINTS, None)
    return [{"support": points(i, support), "query": points(i, query)} for i in range(count)]


def collate(examples):
    """Returns the problems as arrays [B, points, 1]."""
    return jax.tree.map(lambda *arrays: np.stack(arrays), *examples)


def init(key):
    """Returns initial parameters."""
    return NETWORK.init(key, jnp.zeros((1, 1)))


def error(params, points):
    """Returns the mean squared error on points."""
    return jnp.mean((NETWORK.apply(params, points["x"]) - points["y"]) ** 2)


def adapt(params, support):
    """Returns the parameters after steps of gradient descent on the points of a problem."""

    def step(params, _):
        gradients = jax.grad(error)(params, support)
        return jax.tree.map(lambda p, g: p - STEP_SIZE * g, params, gradients), None

    return jax.lax.scan(step, params, None, NUM_STEPS)[0]


def loss(params, batch, key, is_training):
    """Returns the mean error on the query points after adaptation, and that before."""
    del key, is_training
    after = lambda problem: error(adapt(params, problem["support"]), problem["query"])
    before = lambda problem: error(params, problem["query"])
    return jnp.mean(jax.vmap(after)(batch)), {"before": jnp.mean(jax.vmap(before)(batch))}


def predict(params, batch, key):
    """Returns the values of each problem's query points, after adaptation."""
    del key
    values = lambda problem: NETWORK.apply(adapt(params, problem["support"]), problem["query"]["x"])
    return jax.vmap(values)(batch)


def run(trainer_dir, *, num_steps=2500, mesh="data=-1"):
    """Returns the mean errors on new problems, before and after adaptation."""
    schedule = optax.cosine_decay_schedule(3e-3, num_steps)
    task = moelib.Task.default_config().set(init=init, loss=loss, collate=collate, predict=predict)
    moelib.fit(
        task,
        sines(20_000, seed=0),
        trainer_dir=trainer_dir,
        optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule)),
        batch_size=32,
        max_step=num_steps,
        mesh=mesh,
    )
    scores = moelib.evaluate(task, sines(256, seed=1), trainer_dir=trainer_dir, mesh=mesh)
    return {"before": scores["before"], "after": scores["loss"]}


if __name__ == "__main__":
    run_as_command(run, __doc__)
