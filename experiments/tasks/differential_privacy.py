"""Differentially private training (DP-SGD): a digit classifier, and the privacy that it spent.

python -m experiments.tasks.differential_privacy --trainer_dir=runs/private_digits

Each step draws every example with one probability, clips the gradient of each, and adds noise to
their sum. Only the parameters are private: the logged training losses are not.

Source: Abadi et al., arXiv:1607.00133.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from flax import linen
from scipy.special import gammaln, logsumexp, xlog1py

import moelib

from .command import run_as_command
from .image_classification import digits

RATE, CAPACITY = 0.25, 480  # Probability of an example in a step; largest batch, by 7 deviations.
CLIP, NOISE = 1.0, 3.0  # Norm of an example's gradient; deviation of the noise, in units of it.
DELTA = 1e-4

NETWORK = linen.Sequential([linen.Dense(32), linen.tanh, linen.Dense(10)])


def init(key):
    """Returns initial parameters."""
    return NETWORK.init(key, jnp.zeros((1, 64)))


def loss(params, batch, key, is_training):
    """Returns the mean cross-entropy, and the accuracy."""
    del key, is_training
    logits = jnp.asarray(NETWORK.apply(params, batch["image"].reshape(-1, 64)))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return jnp.mean(losses), {"accuracy": jnp.mean(jnp.argmax(logits, -1) == batch["label"])}


def train_step(params, batch, key, apply_gradients):
    """Takes a step with the clipped gradients of all examples and noise."""

    def of_example(example):
        alone = jax.tree.map(lambda x: x[None], example)
        gradient = jax.value_and_grad(lambda p: loss(p, alone, key, True)[0] * example["drawn"])
        return gradient(params)

    losses, gradients = jax.vmap(of_example)(batch)
    private = optax.contrib.differentially_private_aggregate(CLIP, NOISE, key)
    gradients, _ = private.update(gradients, private.init(params))
    return apply_gradients(params, gradients), (jnp.sum(losses), jnp.sum(batch["drawn"]))


def sampler(examples):
    """Returns the function that draws the examples of a step, padded to one size."""

    def draw(epoch):
        drawn = np.random.default_rng(epoch).random(len(examples)) < RATE
        chosen = [{**examples[i], "drawn": np.float32(1)} for i in np.flatnonzero(drawn)]
        padding = {**examples[0], "drawn": np.float32(0)}
        return chosen[:CAPACITY] + [padding] * (CAPACITY - len(chosen))

    return draw


def epsilon(num_steps, *, rate=RATE, noise=NOISE, delta=DELTA):
    """Returns the epsilon of the privacy (epsilon, delta) that the steps spent, by its moments.

    Sources: Mironov, Talwar and Zhang, arXiv:1908.10530, section 3.3; Canonne, Kamath and Steinke,
    arXiv:2004.00010, proposition 12.
    """
    found = []
    for order in range(2, 256):
        k = np.arange(order + 1)
        choose = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
        probability = k * np.log(rate) + xlog1py(order - k, -rate)
        moment = logsumexp(choose + probability + k * (k - 1) / (2 * noise**2))
        divergence = num_steps * moment / (order - 1)
        found.append(divergence + np.log1p(-1 / order) - np.log(delta * order) / (order - 1))
    return float(min(found))


def run(trainer_dir, *, num_steps=100, mesh="data=-1"):
    """Returns the accuracy on test images, and epsilon."""
    train, test = digits()
    task = moelib.Task.default_config().set(init=init, loss=loss, train_step=train_step)
    moelib.fit(
        task,
        sampler(train),
        trainer_dir=trainer_dir,
        optimizer=optax.sgd(1.0, momentum=0.9),
        batch_size=CAPACITY,
        max_step=num_steps,
        mesh=mesh,
    )
    scores = moelib.evaluate(task, test, trainer_dir=trainer_dir, mesh=mesh)
    return {"accuracy": scores["accuracy"], "epsilon": epsilon(num_steps)}


if __name__ == "__main__":
    run_as_command(run, __doc__)
