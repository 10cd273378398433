"""Sequence to sequence: a transformer with encoder and decoder rewrites dates in ISO format.

python -m experiments.tasks.sequence_to_sequence --trainer_dir=runs/dates
"""

import datetime
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen

import moelib
from moelib.core.config import config_for_function
from moelib.learner.optimizers import adamw_optimizer
from moelib.learner.schedules import cosine

from .command import run_as_command

FORMATS = ("%A, %d %B %Y", "%B %d, %Y", "%d.%m.%Y", "%Y, %d %b", "%a %b %d %Y")
START = 0  # Padding of sources, and the token before and after a target.
WIDTH, HEADS = 64, 4


def split(text):
    """Returns the parts of a text: words and digits."""
    return re.findall(r"[A-Za-z]+|\d|-", text)


def dates():
    """Returns the examples of training and of the test: a date as written, and in ISO format."""
    first, rng = datetime.date(1950, 1, 1), np.random.default_rng(0)
    days = [first + datetime.timedelta(int(x)) for x in rng.permutation(36_500)[:4500]]
    formats = [FORMATS[i] for i in rng.integers(len(FORMATS), size=len(days))]
    examples = [
        {"source": day.strftime(form), "target": day.isoformat()}
        for day, form in zip(days, formats, strict=True)
    ]
    return examples[500:], examples[:500]


EXAMPLES, TEST = dates()
WORDS = sorted({word for x in EXAMPLES for text in x.values() for word in split(text)})
SOURCE = max(len(split(x["source"])) for x in EXAMPLES)
TARGET = max(len(split(x["target"])) for x in EXAMPLES) + 1


def encoded(texts, length):
    """Returns the token ids of texts, padded."""
    ids = np.full((len(texts), length), START)
    for row, text in zip(ids, texts, strict=True):
        found = [1 + WORDS.index(word) for word in split(text)]
        row[: len(found)] = found
    return ids


def collate(examples):
    """Returns the token ids of sources and targets."""
    texts = {name: [x[name] for x in examples] for name in ("source", "target")}
    return {
        "source": encoded(texts["source"], SOURCE),
        "target": encoded(texts["target"], TARGET),
    }


class Block(linen.Module):
    """Self-attention, attention to a memory if there is one, and a feed-forward layer."""

    @linen.compact
    def __call__(self, x, memory=None, mask=None):
        """Returns the output for x [B, S, WIDTH]."""
        attention = lambda: linen.MultiHeadDotProductAttention(HEADS)
        x = x + attention()(linen.LayerNorm()(x), mask=mask)
        if memory is not None:
            x = x + attention()(linen.LayerNorm()(x), memory)
        hidden = linen.gelu(linen.Dense(4 * WIDTH)(linen.LayerNorm()(x)))
        return x + linen.Dense(WIDTH)(hidden)


class Embedding(linen.Module):
    """Vectors of tokens and of their positions."""

    num_tokens: int

    @linen.compact
    def __call__(self, ids):
        """Returns vectors [B, S, WIDTH]."""
        positions = self.param("positions", linen.initializers.normal(0.5), (ids.shape[1], WIDTH))
        vectors = linen.Embed(self.num_tokens, WIDTH, embedding_init=linen.initializers.normal(0.5))
        return vectors(ids) + positions[None]


class Decoder(linen.Module):
    """Predicts each token of targets from those before it and a memory [B, M, WIDTH]."""

    num_tokens: int

    @linen.compact
    def __call__(self, memory, targets):
        """Returns logits [B, S, num_tokens]."""
        before = jnp.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=START)
        x = Embedding(self.num_tokens)(before)
        x = Block()(x, memory, linen.make_causal_mask(before))
        return linen.Dense(self.num_tokens)(linen.LayerNorm()(x))


class Translator(linen.Module):
    """Encoder and decoder."""

    @linen.compact
    def __call__(self, source, target):
        """Returns logits of the target's tokens."""
        num_tokens = 1 + len(WORDS)
        memory = Block()(Embedding(num_tokens)(source), mask=source[:, None, None] != START)
        return Decoder(num_tokens)(linen.LayerNorm()(memory), target)


def task_of(network, name, example):
    """Returns the task of a network that maps inputs of that name, and targets, to logits.

    `example` is a batch, of which the shapes count.
    """

    def init(key):
        return network.init(key, example[name], example["target"])

    def logits_of(params, batch, target):
        return jnp.asarray(network.apply(params, batch[name], target))

    def loss(params, batch, key, is_training):
        del key, is_training
        logits = logits_of(params, batch, batch["target"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["target"])
        return jnp.mean(losses)

    def generate(params, batch, key):
        """Returns token ids; each is the most probable one after those before it."""
        del key
        ids = jnp.zeros_like(batch["target"])

        def append(step, ids):
            logits = logits_of(params, batch, ids)[:, step]
            return ids.at[:, step].set(jnp.argmax(logits, -1))

        return jax.lax.fori_loop(0, ids.shape[1], append, ids)

    return moelib.Task.default_config().set(init=init, loss=loss, predict=generate)


def words_of(ids):
    """Returns the texts of token ids up to the first end."""
    return ["".join(WORDS[i - 1] for i in row[: np.argmin([*row, START])]) for row in ids]


def equal(examples, results):
    """Returns the share of examples whose result is the target."""
    return {"exact": np.mean([x["target"] == y for x, y in zip(examples, results, strict=True)])}


def train(task, examples, trainer_dir, *, max_step, mesh):
    """Trains the task."""
    schedule = config_for_function(cosine).set(
        peak_lr=3e-3, warmup_steps=max_step // 10, max_step=max_step
    )
    moelib.fit(
        task,
        examples,
        trainer_dir=trainer_dir,
        optimizer=config_for_function(adamw_optimizer).set(learning_rate=schedule),
        batch_size=64,
        max_step=max_step,
        save_every=max_step,
        mesh=mesh,
    )


def run(trainer_dir, *, max_step=800, mesh="data=-1"):
    """Returns the share of held-out dates that are rewritten without an error, as `exact`."""
    task = task_of(Translator(), "source", collate(EXAMPLES[:1]))
    task.set(collate=collate, postprocess=words_of, metric=equal)
    train(task, EXAMPLES, trainer_dir, max_step=max_step, mesh=mesh)
    return moelib.evaluate(task, TEST, trainer_dir=trainer_dir, mesh=mesh)


if __name__ == "__main__":
    run_as_command(run, __doc__)
