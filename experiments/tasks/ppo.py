"""Reinforcement learning by proximal policy optimization (PPO): the pole of Gymnasium's CartPole.

python -m experiments.tasks.ppo --trainer_dir=runs/cartpole

The examples of an epoch are the transitions that the current policy makes, several times each.

Source: Schulman et al., arXiv:1707.06347. Letters: T steps, N environments.
"""

import itertools

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax

import moelib
from moelib.core.config import config_for_class

from .command import run_as_command

NUM_ENVS, NUM_STEPS, NUM_PASSES, BATCH_SIZE = 8, 128, 4, 256
STEPS_PER_EPOCH = NUM_ENVS * NUM_STEPS * NUM_PASSES // BATCH_SIZE
DISCOUNT, TRACE_DECAY, CLIP, ENTROPY = 0.99, 0.95, 0.2, 0.01


def mlp(key, *sizes):
    """Returns the parameters of a network with orthogonal weights, and a last layer near 0."""
    pairs = list(itertools.pairwise(sizes))
    scales = [2**0.5] * (len(pairs) - 1) + [0.01]
    make = lambda pair, scale, key: jax.nn.initializers.orthogonal(scale)(key, pair)
    keys = jax.random.split(key, len(pairs))
    return [
        {"weight": make(pair, scale, key), "bias": jnp.zeros((1, pair[1]))}
        for pair, scale, key in zip(pairs, scales, keys, strict=True)
    ]


def apply(layers, x, tanh=jnp.tanh):
    """Returns the outputs of a network: of arrays of JAX, or of NumPy with its tanh."""
    for layer in layers[:-1]:
        x = tanh(x @ layer["weight"] + layer["bias"])
    return x @ layers[-1]["weight"] + layers[-1]["bias"]


def init(key):
    """Returns the parameters of the policy and of the value function."""
    policy, value = jax.random.split(key)
    return {"policy": mlp(policy, 4, 64, 64, 2), "value": mlp(value, 4, 64, 64, 1)}


def loss(params, batch, key, is_training):
    """Returns the clipped surrogate loss, with those of values and entropy, and its weight."""
    del key, is_training
    logs = jax.nn.log_softmax(apply(params["policy"], batch["observation"]))
    chosen = jnp.take_along_axis(logs, batch["action"][:, None], 1)[:, 0]
    ratio = jnp.exp(chosen - batch["log_probability"])
    clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
    gain = jnp.minimum(ratio * batch["advantage"], clipped * batch["advantage"])
    entropy = -jnp.sum(jnp.exp(logs) * logs, 1)
    error = apply(params["value"], batch["observation"])[:, 0] - batch["return"]
    losses = -gain + 0.5 * error**2 - ENTROPY * entropy
    weight = jnp.sum(batch["weight"])
    mean = lambda x: (jnp.sum(x * batch["weight"]), weight)
    return mean(losses), {"value_loss": mean(error**2), "entropy": mean(entropy)}


class Rollouts:
    """Examples of an epoch: transitions under the parameters, in environments that go on."""

    def __init__(self, seed=0):
        """Starts the environments."""
        self.rng = np.random.default_rng(seed)
        self.envs = gymnasium.make_vec(
            "CartPole-v1", NUM_ENVS, vectorization_mode="vector_entry_point"
        )
        self.observation, _ = self.envs.reset(seed=seed)
        self.ended = np.zeros(NUM_ENVS, bool)  # The next step only resets these environments.

    def __call__(self, epoch, params):
        """Returns the transitions, with their advantages and returns."""
        del epoch
        steps = [self._step(params["policy"]) for _ in range(NUM_STEPS)]
        data = {name: np.stack([step[name] for step in steps]) for name in steps[0]}  # [T, N, ...]
        value = lambda x: apply(params["value"], x, np.tanh)[..., 0]
        values, following = value(data["observation"]), value(data.pop("next"))
        going, weight = 1.0 - data.pop("ended"), data["weight"]
        error = data.pop("reward") + DISCOUNT * (1.0 - data.pop("failed")) * following - values
        advantage = np.zeros((NUM_STEPS + 1, NUM_ENVS))
        for t in reversed(range(NUM_STEPS)):
            advantage[t] = error[t] + DISCOUNT * TRACE_DECAY * going[t] * advantage[t + 1]
        advantage = advantage[:-1]
        data["return"] = advantage + values
        mean = np.average(advantage, weights=weight)
        deviation = np.average((advantage - mean) ** 2, weights=weight) ** 0.5
        data["advantage"] = (advantage - mean) / deviation
        rows = {k: x.reshape(-1, *x.shape[2:]) for k, x in data.items()}
        examples = [{k: x[i] for k, x in rows.items()} for i in range(NUM_STEPS * NUM_ENVS)]
        return examples * NUM_PASSES

    def _step(self, policy):
        logs = np.asarray(apply(policy, self.observation, np.tanh), np.float64)
        logs -= np.log(np.sum(np.exp(logs), 1, keepdims=True))
        action = (self.rng.random(NUM_ENVS) < np.exp(logs[:, 1])).astype(np.int64)
        step = {
            "observation": self.observation.astype(np.float32),
            "action": action,
            "log_probability": logs[np.arange(NUM_ENVS), action],
            "weight": 1.0 - self.ended,
        }
        self.observation, reward, failed, truncated, _ = self.envs.step(action)
        self.ended = failed | truncated
        observation = self.observation.astype(np.float32)
        return step | {
            "reward": reward,
            "next": observation,
            "failed": failed,
            "ended": self.ended,
        }


def mean_return(params, num_episodes=20):
    """Returns the mean return of the most probable actions."""
    policy = jax.tree.map(np.asarray, params["policy"])
    envs = gymnasium.make_vec("CartPole-v1", num_episodes, vectorization_mode="vector_entry_point")
    observation, _ = envs.reset(seed=1)
    going, total = np.ones(num_episodes, bool), 0.0
    while going.any():
        action = np.argmax(apply(policy, observation, np.tanh), 1)
        observation, reward, failed, truncated, _ = envs.step(action)
        total += np.sum(reward * going)
        going &= ~(failed | truncated)
    return total / num_episodes


def run(trainer_dir, *, num_epochs=80, mesh="data=-1"):
    """Returns the mean return of the trained policy."""
    num_steps = num_epochs * STEPS_PER_EPOCH
    schedule = optax.linear_schedule(1e-3, 0.0, num_steps)
    result = moelib.fit(
        moelib.Task.default_config().set(init=init, loss=loss),
        config_for_class(Rollouts),
        trainer_dir=trainer_dir,
        optimizer=optax.chain(optax.clip_by_global_norm(0.5), optax.adam(schedule)),
        batch_size=BATCH_SIZE,
        max_step=num_steps,
        mesh=mesh,
    )
    return {"return": mean_return(result.params)}


if __name__ == "__main__":
    run_as_command(run, __doc__)
