"""Federated averaging (FedAvg): clients with uneven shares of digits train one classifier.

python -m experiments.tasks.federated_averaging --trainer_dir=runs/federated_digits

An example is a client with its data, and a step is a round: its clients, split over the devices,
each train the model on their own data, and the average of their models is the next one.

Source: McMahan et al., arXiv:1602.05629. Letters: C clients of a round, N examples of a client.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen

import moelib

from .command import run_as_command
from .image_classification import digits

NUM_CLIENTS, CLIENTS_PER_ROUND = 24, 8
NUM_PASSES, LOCAL_BATCH, LOCAL_RATE = 2, 16, 0.1
NETWORK = linen.Sequential([linen.Dense(64), linen.relu, linen.Dense(10)])


def split(examples, concentration=0.3, seed=0):
    """Returns clients whose shares of each class are drawn from a Dirichlet distribution."""
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet([concentration] * NUM_CLIENTS, 10)
    owners = np.array([rng.choice(NUM_CLIENTS, p=shares[e["label"]]) for e in examples])
    size = -(-max(np.bincount(owners)) // LOCAL_BATCH) * LOCAL_BATCH
    return [_client([examples[i] for i in np.flatnonzero(owners == c)], size) for c in set(owners)]


def _client(examples, size):
    """Returns a client's arrays [N, ...], padded with examples of weight 0."""
    padding = [{**examples[0], "weight": 0.0}] * (size - len(examples))
    rows = [{**example, "weight": 1.0} for example in examples] + padding
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def init(key):
    """Returns initial parameters."""
    return NETWORK.init(key, jnp.zeros((1, 64)))


def loss(params, batch, key, is_training):
    """Returns the sum of the cross-entropy and its weight, and the accuracy."""
    del key, is_training
    logits = jnp.asarray(NETWORK.apply(params, batch["image"].reshape(-1, 64)))
    weights = batch.get("weight", jnp.ones(len(logits)))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    hits = jnp.argmax(logits, -1) == batch["label"]
    total = jnp.sum(weights)
    return (jnp.sum(losses * weights), total), {"accuracy": (jnp.sum(hits * weights), total)}


def train_locally(params, client, key):
    """Returns the parameters after passes over a client's data, and the mean loss."""

    def mean_loss(params, batch):
        total, weight = loss(params, batch, key, True)[0]
        return total / jnp.maximum(weight, 1.0)

    def step(params, rows):
        batch = jax.tree.map(lambda x: x[rows], client)
        value, gradients = jax.value_and_grad(mean_loss)(params, batch)
        return jax.tree.map(lambda p, g: p - LOCAL_RATE * g, params, gradients), value

    size = len(client["label"])
    orders = [jax.random.permutation(k, size) for k in jax.random.split(key, NUM_PASSES)]
    params, losses = jax.lax.scan(step, params, jnp.concatenate(orders).reshape(-1, LOCAL_BATCH))
    return params, jnp.mean(losses)


def train_step(params, clients, key, apply_gradients):
    """Takes a round: the new model is the average over clients, weighted by their examples."""
    sizes = jnp.sum(clients["weight"], 1)  # [C]
    keys = jax.random.split(key, len(sizes))
    trained, losses = jax.vmap(train_locally, (None, 0, 0))(params, clients, keys)
    mean = lambda x: jnp.tensordot(sizes / jnp.sum(sizes), x, 1)
    # With a learning rate of 1, the new parameters are the average.
    change = jax.tree.map(lambda old, new: old - mean(new), params, trained)
    return apply_gradients(params, change), (jnp.sum(losses * sizes), jnp.sum(sizes))


def run(trainer_dir, *, num_rounds=60, mesh="data=-1"):
    """Returns the accuracy on test images."""
    train, test = digits()
    task = moelib.Task.default_config().set(init=init, loss=loss, train_step=train_step)
    moelib.fit(
        task,
        split(train),
        trainer_dir=trainer_dir,
        optimizer=optax.sgd(1.0),
        batch_size=CLIENTS_PER_ROUND,
        max_step=num_rounds,
        mesh=mesh,
    )
    scores = moelib.evaluate(task, test, trainer_dir=trainer_dir, mesh=mesh)
    return {"accuracy": scores["accuracy"]}


if __name__ == "__main__":
    run_as_command(run, __doc__)
