"""Diffusion: a network that removes noise draws handwritten digits of a given class.

python -m experiments.tasks.diffusion --trainer_dir=runs/diffusion

Sources: training, Ho et al., arXiv:2006.11239; sampling, Song et al., arXiv:2010.02502; cosine
schedule of the noise, Nichol and Dhariwal, arXiv:2102.09672.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

import moelib
from moelib.core.config import config_for_function
from moelib.learner.optimizers import adamw_optimizer
from moelib.learner.schedules import cosine

from .command import run_as_command
from .image_classification import digits

STEPS = 30  # Of sampling.
WIDTH = 128


class Denoiser(linen.Module):
    """Predicts the noise in images [B, 64], of given classes, at times from 0 to 1 (all noise)."""

    @linen.compact
    def __call__(self, images, labels, times):
        """Returns the predicted noise [B, 64]."""
        frequencies = 2.0 ** jnp.arange(6) * jnp.pi / 4
        angles = times[:, None] * frequencies[None]
        known = [jnp.sin(angles), jnp.cos(angles), jax.nn.one_hot(labels, 10)]
        condition = linen.swish(linen.Dense(WIDTH)(jnp.concatenate(known, -1)))
        x = linen.Dense(WIDTH)(images)
        for _ in range(2):
            scale, shift = jnp.split(linen.Dense(2 * WIDTH)(condition), 2, -1)
            hidden = linen.swish(linen.LayerNorm()(x) * (1 + scale) + shift)
            x = x + linen.Dense(WIDTH)(hidden)
        return linen.Dense(64)(linen.LayerNorm()(x))


NETWORK = Denoiser()


def init(key):
    """Returns initial parameters."""
    return NETWORK.init(key, jnp.zeros((1, 64)), jnp.zeros(1, int), jnp.zeros(1))


def shares(times):
    """Returns the factors of the image and of the noise at times [B], each [B, 1]."""
    angles = jnp.pi / 2 * (0.005 + 0.99 * times[:, None])
    return jnp.cos(angles), jnp.sin(angles)


def loss(params, batch, key, is_training):
    """Returns the mean squared error of the noise."""
    del is_training
    of_times, of_noise = jax.random.split(key)
    images = 2 * batch["image"].reshape(-1, 64) - 1
    times = jax.random.uniform(of_times, images.shape[:1])
    noise = jax.random.normal(of_noise, images.shape)
    signal, amount = shares(times)
    found = NETWORK.apply(params, signal * images + amount * noise, batch["label"], times)
    return jnp.mean((jnp.asarray(found) - noise) ** 2)


def sample(params, batch, key):
    """Returns images [B, 8, 8] of the classes `label`, with values 0 to 1."""
    labels = batch["label"]
    images = jax.random.normal(key, (len(labels), 64))

    def denoise(step, images):
        times = jnp.full(len(labels), 1 - step / STEPS)
        signal, amount = shares(times)
        noise = jnp.asarray(NETWORK.apply(params, images, labels, times))
        clean = jnp.clip((images - amount * noise) / signal, -1, 1)
        noise = (images - signal * clean) / amount
        signal, amount = shares(times - 1 / STEPS)
        return signal * clean + amount * noise

    images = jax.lax.fori_loop(0, STEPS, denoise, images)
    return jnp.clip((images + 1) / 2, 0, 1).reshape(-1, 8, 8)


def named(examples, images):
    """Returns the share of images that a classifier of real digits names as wanted."""
    from sklearn.svm import SVC

    train, _ = digits()
    flat = lambda images: np.reshape(images, (len(images), 64))
    classifier = SVC().fit(flat([x["image"] for x in train]), [x["label"] for x in train])
    found = classifier.predict(flat(images))
    return {"named": np.mean(found == [x["label"] for x in examples])}


def run(trainer_dir, *, max_step=1500, mesh="data=-1"):
    """Returns the share of images that a classifier names as wanted."""
    train, test = digits()
    schedule = config_for_function(cosine).set(
        peak_lr=4e-3, warmup_steps=max_step // 20, max_step=max_step
    )
    task = moelib.Task.default_config().set(init=init, loss=loss, predict=sample, metric=named)
    moelib.fit(
        task,
        train,
        trainer_dir=trainer_dir,
        optimizer=config_for_function(adamw_optimizer).set(learning_rate=schedule),
        batch_size=64,
        max_step=max_step,
        save_every=max_step,
        mesh=mesh,
    )
    return moelib.evaluate(task, test, trainer_dir=trainer_dir, mesh=mesh)


if __name__ == "__main__":
    run_as_command(run, __doc__)
