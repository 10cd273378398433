"""Captioning: a convolutional encoder and a transformer decoder describe handwritten digits.

python -m experiments.tasks.captioning --trainer_dir=runs/captions

A caption names the weight of the pen, letter by letter, and the digit: "thin seven".
"""

import jax.numpy as jnp
import numpy as np
from flax import linen

import moelib

from . import sequence_to_sequence
from .command import run_as_command
from .image_classification import digits
from .sequence_to_sequence import WIDTH, Decoder

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LETTERS = "\0 abcdefghijklmnopqrstuvwxyz"  # The first ends a caption.
LENGTH = 11  # Of the longest caption, and its end.


def caption(image, label):
    """Returns the caption of a digit."""
    return f"{'bold' if image.mean() > 0.31 else 'thin'} {NAMES[label]}"


def captioned(examples):
    """Returns digits with captions as targets."""
    return [{"image": x["image"], "target": caption(x["image"], x["label"])} for x in examples]


def collate(examples):
    """Returns images and the letters of their captions, padded."""
    rows = [[LETTERS.index(letter) for letter in x["target"].ljust(LENGTH, "\0")] for x in examples]
    return {"image": np.stack([x["image"] for x in examples]), "target": np.array(rows)}


class Captioner(linen.Module):
    """Encoder of images and decoder of captions."""

    @linen.compact
    def __call__(self, images, target):
        """Returns logits of the caption's letters."""
        x = linen.relu(linen.Conv(32, (3, 3))(images[..., None]))
        x = linen.relu(linen.Conv(WIDTH, (3, 3), strides=2)(x))
        whole = linen.Dense(WIDTH)(linen.relu(linen.Dense(128)(x.reshape(len(x), -1))))
        memory = jnp.concatenate([whole[:, None], x.reshape(len(x), -1, WIDTH)], 1)
        return Decoder(len(LETTERS))(linen.LayerNorm()(memory), target)


def texts_of(ids):
    """Returns the captions of rows of letters, up to their ends."""
    return ["".join(LETTERS[i] for i in row).split("\0")[0] for row in ids]


def scores(examples, results):
    """Returns the shares of captions without an error, and with the right digit."""
    pairs = [(x["target"], y) for x, y in zip(examples, results, strict=True)]
    named = [target.split()[1] == text.split()[-1] for target, text in pairs if text.split()]
    return {"exact": np.mean([a == b for a, b in pairs]), "named": np.sum(named) / len(pairs)}


def run(trainer_dir, *, max_step=400, mesh="data=-1"):
    """Returns the shares of captions of test images without an error, and with the right digit."""
    train, test = map(captioned, digits())
    task = sequence_to_sequence.task_of(Captioner(), "image", collate(train[:1]))
    task.set(collate=collate, postprocess=texts_of, metric=scores)
    sequence_to_sequence.train(task, train, trainer_dir, max_step=max_step, mesh=mesh)
    return moelib.evaluate(task, test, trainer_dir=trainer_dir, mesh=mesh)


if __name__ == "__main__":
    run_as_command(run, __doc__)
