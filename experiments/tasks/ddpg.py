"""Reinforcement learning by deep deterministic policy gradients (DDPG): Gymnasium's Pendulum.

python -m experiments.tasks.ddpg --trainer_dir=runs/pendulum

The examples of an epoch are indices into a replay buffer, to which the current policy adds first.
The buffer is not saved: after a restart, it is empty.

Source: Lillicrap et al., arXiv:1509.02971.
"""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax

import moelib
from moelib.layers.external import Updated

from .command import run_as_command
from .ppo import apply, mlp

NUM_ENVS, NUM_STEPS, BATCH_SIZE, UPDATES_PER_EPOCH = 4, 200, 256, 100  # 200: a whole episode.
DISCOUNT, AVERAGING, NOISE, REWARD_SCALE = 0.98, 0.01, 0.2, 0.1


def init(key):
    """Returns the parameters of policy and critic, and their moving averages, the targets."""
    policy, critic = jax.random.split(key)
    trained = {"policy": mlp(policy, 3, 64, 64, 1), "critic": mlp(critic, 4, 64, 64, 1)}
    return {"trained": trained, "target": jax.tree.map(jnp.copy, trained)}


def act(networks, observation, tanh=jnp.tanh):
    """Returns the policy's actions, -1 to 1."""
    return tanh(apply(networks["policy"], observation, tanh))


def critic(networks, observation, action):
    """Returns the values of actions."""
    return apply(networks["critic"], jnp.concatenate([observation, action], 1))[:, 0]


def loss(params, batch, key, is_training):
    """Returns the critic's error and minus the value of the policy's actions."""
    del key, is_training
    trained, target = params["trained"], params["target"]
    following = critic(target, batch["next"], act(target, batch["next"]))
    goal = jax.lax.stop_gradient(REWARD_SCALE * batch["reward"] + DISCOUNT * following)
    error = jnp.mean((critic(trained, batch["observation"], batch["action"]) - goal) ** 2)
    fixed = jax.lax.stop_gradient(trained)
    actions = act(trained, batch["observation"])
    value = jnp.mean(critic(fixed, batch["observation"], actions))
    mean = lambda old, new: old + AVERAGING * (new - old)
    new_target = {"target": jax.tree.map(mean, target, fixed)}
    return Updated((error - value, {"error": error, "value": value}), new_target)


def play(networks, num_envs, seed, noise=0.0):
    """Returns the transitions [steps * environments, ...] of an episode of each environment.

    Without networks, actions are random.
    """
    rng, steps = np.random.default_rng(seed), []
    envs = gymnasium.make_vec("Pendulum-v1", num_envs)
    observation, _ = envs.reset(seed=seed)
    for _ in range(NUM_STEPS):
        if networks is None:
            action = rng.uniform(-1, 1, (num_envs, 1)).astype(np.float32)
        else:
            action = act(networks, observation, np.tanh)
            action += noise * rng.standard_normal(action.shape, np.float32)
        action = np.clip(action, -1, 1)
        step = {"observation": observation, "action": action}
        observation, reward, *_ = envs.step(2 * action)  # Torques are -2 to 2.
        steps.append(step | {"reward": reward.astype(np.float32), "next": observation})
    envs.close()
    return {name: np.concatenate([step[name] for step in steps]) for name in steps[0]}


def replay_buffer(seed=0):
    """Returns the functions that fill a buffer and draw from it: `examples` and `collate`."""
    buffer = {}

    def examples(epoch, params):
        networks = params["trained"] if epoch else None
        new = play(networks, NUM_ENVS, seed + epoch, NOISE)
        buffer.update({k: np.concatenate([buffer.get(k, x[:0]), x]) for k, x in new.items()})
        rng = np.random.default_rng(epoch)
        return rng.integers(len(buffer["reward"]), size=UPDATES_PER_EPOCH * BATCH_SIZE)

    collate = lambda indices: {name: x[np.array(indices)] for name, x in buffer.items()}
    return examples, collate


def run(trainer_dir, *, num_epochs=40, mesh="data=-1"):
    """Returns the mean return of the trained policy, without noise."""
    examples, collate = replay_buffer()
    fixed = ["target/.*"]
    result = moelib.fit(
        moelib.Task.default_config().set(init=init, loss=loss, collate=collate, fixed=fixed),
        examples,
        trainer_dir=trainer_dir,
        optimizer=optax.adam(2e-3),
        batch_size=BATCH_SIZE,
        max_step=num_epochs * UPDATES_PER_EPOCH,
        mesh=mesh,
    )
    networks = jax.tree.map(np.asarray, result.params["trained"])
    episodes = play(networks, num_envs=20, seed=10**6)
    return {"return": float(np.mean(episodes["reward"]) * NUM_STEPS)}


if __name__ == "__main__":
    run_as_command(run, __doc__)
