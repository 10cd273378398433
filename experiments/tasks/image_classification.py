"""Image classification: a convolutional network in Flax linen names handwritten digits.

python -m experiments.tasks.image_classification --trainer_dir=runs/digits
"""

import math

import jax.numpy as jnp
import numpy as np
import optax
from flax import linen

import moelib
from moelib.core.config import config_for_function
from moelib.learner.optimizers import adamw_optimizer
from moelib.learner.schedules import cosine

from .command import run_as_command

NUM_TEST, BATCH_SIZE = 360, 64


class Network(linen.Module):
    """A convolutional network for images of 8 x 8 pixels."""

    @linen.compact
    def __call__(self, images, *, is_training):
        """Returns the logits of the ten classes."""
        x = images[..., None]
        for channels in (32, 64):
            x = linen.relu(linen.Conv(channels, (3, 3))(x))
        x = linen.relu(linen.Dense(128)(x.reshape(len(x), -1)))
        x = linen.Dropout(0.2, deterministic=not is_training)(x)
        return linen.Dense(10)(x)


NETWORK = Network()


def digits():
    """Returns the examples of training and of the test: images with values 0 to 1, and labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = np.reshape(images, (-1, 8, 8)).astype(np.float32) / 16
    order = np.random.default_rng(0).permutation(len(images))
    examples = [{"image": images[i], "label": labels[i]} for i in order]
    return examples[NUM_TEST:], examples[:NUM_TEST]


def init(key):
    """Returns initial parameters."""
    return NETWORK.init(key, jnp.zeros((1, 8, 8)), is_training=False)


def logits_of(params, images, **options):
    """Returns the logits [B, 10] of images [B, 8, 8]."""
    return jnp.asarray(NETWORK.apply(params, images, **options))


def loss(params, batch, key, is_training):
    """Returns the mean cross-entropy, and the accuracy."""
    logits = logits_of(params, batch["image"], is_training=is_training, rngs={"dropout": key})
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    hits = jnp.argmax(logits, -1) == batch["label"]
    return jnp.mean(losses), {"accuracy": jnp.mean(hits)}


def predict(params, batch, key):
    """Returns the classes of images."""
    del key
    return jnp.argmax(logits_of(params, batch["image"], is_training=False), -1)


def run(trainer_dir, *, num_epochs=15, mesh="data=-1"):
    """Returns the metrics of the last step on the test images."""
    train, test = digits()
    num_steps = math.ceil(num_epochs * len(train) / BATCH_SIZE)  # As many as `fit` takes.
    schedule = config_for_function(cosine).set(
        peak_lr=2e-3, warmup_steps=num_steps // 16, max_step=num_steps
    )
    task = moelib.Task.default_config().set(init=init, loss=loss, predict=predict)
    moelib.fit(
        task,
        train,
        trainer_dir=trainer_dir,
        optimizer=config_for_function(adamw_optimizer).set(
            learning_rate=schedule, weight_decay=1e-2
        ),
        batch_size=BATCH_SIZE,
        num_epochs=num_epochs,
        eval_examples=test,
        best_metric="validation/accuracy",
        best_mode="max",
        mesh=mesh,
    )
    return moelib.evaluate(task, test, trainer_dir=trainer_dir, mesh=mesh)


if __name__ == "__main__":
    run_as_command(run, __doc__)
