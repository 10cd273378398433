"""Batches that expose mistakes: packed documents, uneven padding, and sequences of padding only."""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from moelib.core.errors import UserError
from moelib.core.tree import Batch

_MAX_PADDING = 6  # Padding tokens at the end of a sequence.


def vocab_size(cfg: Any) -> int:
    """Returns the vocabulary size of a trainer config's model; 64 for a model without one."""
    return dict(cfg.model.items()).get("vocab_size") or 64


def batches_of(trainer: Any) -> Iterator[Batch]:
    """Yields packed batches for a trainer's step; its input's own if its model reads no tokens.

    Those of an input with the arrays of the model's objective have normal numbers in them.
    """
    cfg = trainer.config
    if not trainer.model.is_language_model:
        yield from trainer.input.iterator()
    sizes = cfg.input.global_batch_size, cfg.input.seq_len, vocab_size(cfg)
    objective: Any = dict(cfg.model.items()).get("objective")
    specs = {} if objective is None else cfg.input.abstract_batch(lambda: trainer.input)
    specs = {name: x for name, x in specs.items() if name in objective.klass.arrays}
    for seed in itertools.count():
        rng = np.random.default_rng(seed)
        drawn = {n: rng.normal(size=x.shape).astype(x.dtype) for n, x in specs.items()}
        yield packed_batch(*sizes, seed) | drawn


def num_sequences(batch: Batch) -> int:
    """Returns the number of sequences, or examples, of a batch."""
    return len(jax.tree.leaves(batch)[0])


def packed_batch(batch_size: int, seq_len: int, vocab_size: int, seed: int) -> Batch:
    """Returns sequences of two documents followed by padding; the last one is all padding.

    In every other sequence the loss counts the second document only, so that sequences have
    different weights. Raises UserError if sequences are too few or too short for this.
    """
    if batch_size < 2 or seq_len < _MAX_PADDING + 4:
        raise UserError(
            f"input.global_batch_size={batch_size}, input.seq_len={seq_len}: set them to at least "
            f"2 and {_MAX_PADDING + 4}."
        )
    rng = np.random.default_rng(seed)
    shape = (batch_size, seq_len)
    number = np.arange(batch_size)[:, None]
    index = np.broadcast_to(np.arange(seq_len), shape)
    ids = rng.integers(0, vocab_size, shape)
    second = rng.integers(2, seq_len - _MAX_PADDING, (batch_size, 1))  # Start of document 2.
    end = np.where(number == batch_size - 1, 0, seq_len - number % (_MAX_PADDING + 1))
    segments = np.where(index >= end, 0, np.where(index < second, 1, 2))
    counted = (segments > 0) & ((segments == 2) | (number % 2 == 0))
    arrays = {
        "input_ids": ids,
        "target_labels": _labels(ids, segments, counted),
        "segment_ids": segments,
        "positions": np.where(index < second, index, index - second),
    }
    return {name: x.astype(np.int32) for name, x in arrays.items()}


def with_other_segment(batch: Batch, segment: int, vocab_size: int, seed: int) -> Batch:
    """Returns the batch with other tokens in a segment; in padding (0), other positions too."""
    rng = np.random.default_rng(seed)
    inside = batch["segment_ids"] == segment
    other = {"input_ids": rng.integers(0, vocab_size, inside.shape)}
    if segment == 0:
        other["positions"] = rng.integers(0, inside.shape[1], inside.shape)
    changed = {name: np.where(inside, x, batch[name]) for name, x in other.items()}
    return batch | {name: x.astype(np.int32) for name, x in changed.items()}


def with_loss_of(batch: Batch, document: int) -> Batch:
    """Returns the batch with a loss over document 1 or 2 of every sequence only."""
    segments = batch["segment_ids"]
    labels = _labels(batch["input_ids"], segments, segments == document)
    return batch | {"target_labels": labels.astype(np.int32)}


def with_loss_until(batch: Batch, position: int) -> Batch:
    """Returns the batch with a loss of the tokens up to a position of each sequence only."""
    labels = np.where(_index(batch) <= position, batch["target_labels"], -1)
    return batch | {"target_labels": labels.astype(np.int32)}


def with_other_tokens_after(batch: Batch, position: int, vocab_size: int, seed: int) -> Batch:
    """Returns the batch with other tokens after a position of each sequence, and its labels."""
    other = np.random.default_rng(seed).integers(0, vocab_size, batch["input_ids"].shape)
    ids = np.where(_index(batch) > position, other, batch["input_ids"])
    return batch | {"input_ids": ids.astype(np.int32)}


def _index(batch: Batch) -> np.ndarray:
    return np.arange(batch["input_ids"].shape[1])


def _labels(ids: np.ndarray, segments: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """Returns the next tokens of the same documents where they are counted, and -1 elsewhere."""
    follows = np.roll(segments, -1, 1) == segments
    follows[:, -1] = False
    return np.where(counted & follows, np.roll(ids, -1, 1), -1)


def first_half_twice(batch: Batch) -> Batch:
    """Returns the first half of the sequences, two times."""
    half = len(batch["input_ids"]) // 2
    return {name: np.concatenate([x[:half], x[:half]]) for name, x in batch.items()}


def first_half_padded(batch: Batch) -> Batch:
    """Returns the first half of the sequences, then as many sequences of padding."""
    half = len(batch["input_ids"]) // 2
    padding = all_padding(batch)
    return {name: np.concatenate([x[:half], padding[name][half:]]) for name, x in batch.items()}


def all_padding(batch: Batch) -> Batch:
    """Returns a batch of padding only."""
    zeros = np.zeros_like(batch["segment_ids"])
    return {**batch, "segment_ids": zeros, "target_labels": zeros - 1}
