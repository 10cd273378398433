"""Text classification: a bag of words tells from which module of Python some lines of code are.

python -m experiments.tasks.text_classification --trainer_dir=runs/modules
"""

import importlib
import inspect
import re
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

import moelib
from moelib.core.config import config_for_function
from moelib.learner.optimizers import adamw_optimizer

from .command import run_as_command

MODULES = (
    *("argparse", "_pydecimal", "difflib", "doctest", "inspect", "mailbox", "pickletools"),
    *("smtplib", "subprocess", "tarfile", "typing", "zipfile"),
)
LINES = 25  # Lines of code per example.
BUCKETS, NUM_WORDS, DIM = 4096, 128, 64  # Hashes of words; words per example; size of vectors.


def snippets():
    """Returns the examples of training and of the test, a fifth: lines of code and their module."""
    examples = []
    for name in MODULES:
        lines = inspect.getsource(importlib.import_module(name)).splitlines()
        texts = ("\n".join(lines[i : i + LINES]) for i in range(0, len(lines), LINES))
        examples += [{"text": text, "module": name} for text in texts if len(text) > 200]
    order = np.random.default_rng(0).permutation(len(examples))
    examples = [examples[i] for i in order]
    return examples[len(examples) // 5 :], examples[: len(examples) // 5]


def collate(examples):
    """Returns the hashed words of each example, 1 to BUCKETS, padded with 0, and its label."""
    words = np.zeros((len(examples), NUM_WORDS), np.int32)
    for row, example in zip(words, examples, strict=True):
        found = re.findall(r"[a-z]+", example["text"].lower())[:NUM_WORDS]
        row[: len(found)] = [1 + zlib.crc32(word.encode()) % BUCKETS for word in found]
    return {"words": words, "label": [MODULES.index(x["module"]) for x in examples]}


def init(key):
    """Returns initial parameters."""
    keys = jax.random.split(key, 3)
    matrix = jax.nn.initializers.lecun_normal()
    return {
        "embedding": jax.random.normal(keys[0], (1 + BUCKETS, DIM)),
        "hidden": matrix(keys[1], (2 * DIM, DIM)),
        "head": matrix(keys[2], (DIM, len(MODULES))),
    }


def logits_of(params, words):
    """Returns the logits [B, number of modules] of hashed words [B, NUM_WORDS]."""
    vectors = params["embedding"][words]  # [B, NUM_WORDS, DIM]
    valid = words[..., None] > 0
    mean = jnp.sum(vectors * valid, 1) / jnp.maximum(jnp.sum(valid, 1), 1)
    largest = jnp.max(jnp.where(valid, vectors, -10.0), 1)
    hidden = jax.nn.relu(jnp.concatenate([mean, largest], -1) @ params["hidden"])
    return hidden @ params["head"]


def loss(params, batch, key, is_training):
    """Returns the mean cross-entropy; in training, a third of the words are hidden."""
    words = batch["words"]
    if is_training:
        words = words * jax.random.bernoulli(key, 2 / 3, words.shape)
    logits = logits_of(params, words)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]))


def predict(params, batch, key):
    """Returns the classes of texts."""
    del key
    return jnp.argmax(logits_of(params, batch["words"]), -1)


def metric(examples, results):
    """Returns the share of examples whose module is found."""
    hits = [x["module"] == result for x, result in zip(examples, results, strict=True)]
    return {"accuracy": np.mean(hits)}


def run(trainer_dir, *, num_epochs=20, mesh="data=-1"):
    """Returns the metrics of test examples."""
    train, test = snippets()
    task = moelib.Task.default_config().set(
        init=init,
        loss=loss,
        collate=collate,
        predict=predict,
        postprocess=lambda classes: [MODULES[i] for i in classes],
        metric=metric,
    )
    optimizer = config_for_function(adamw_optimizer).set(learning_rate=5e-3, weight_decay=0.1)
    settings = {"optimizer": optimizer, "batch_size": 64, "num_epochs": num_epochs, "mesh": mesh}
    moelib.fit(task, train, trainer_dir=trainer_dir, eval_examples=test, save_every=100, **settings)
    return moelib.evaluate(task, test, trainer_dir=trainer_dir, mesh=mesh)


if __name__ == "__main__":
    run_as_command(run, __doc__)
