"""Batches that bring out mistakes: packed documents, uneven rows, padding at ends, padding only."""

from typing import Any

import numpy as np

from moelib.core.tree import Batch

_MOST_PADDING = 6  # Tokens at the end of a row.


def packed_batch(num_rows: int, seq_len: int, vocab_size: int, seed: int) -> Batch:
    """Returns rows of two documents each with some padding after them; the last is all padding.

    The loss counts the second document alone in every other row, so that rows weigh differently.

    Raises:
        ValueError: If there is no room for that.
    """
    if num_rows < 2 or seq_len < _MOST_PADDING + 4:
        raise ValueError(
            f"input.global_batch_size is {num_rows} and input.seq_len {seq_len}; set them to 2 and "
            f"{_MOST_PADDING + 4} or more."
        )
    rng = np.random.default_rng(seed)
    shape = (num_rows, seq_len)
    rows = np.arange(num_rows)[:, None]
    index = np.broadcast_to(np.arange(seq_len), shape)
    ids = rng.integers(0, vocab_size, shape)
    second = rng.integers(2, seq_len - _MOST_PADDING, (num_rows, 1))  # Where a document begins.
    end = seq_len - rows % (_MOST_PADDING + 1)
    end = np.where(rows == num_rows - 1, 0, end)
    segments = np.where(index >= end, 0, np.where(index < second, 1, 2))
    follows = np.roll(segments, -1, 1) == segments
    follows[:, -1] = False
    counted = (segments > 0) & follows & ((segments == 2) | (rows % 2 == 0))
    return _arrays(
        input_ids=ids,
        target_labels=np.where(counted, np.roll(ids, -1, 1), -1),
        segment_ids=segments,
        positions=np.where(index < second, index, index - second),
    )


def with_other_padding(batch: Batch, vocab_size: int, seed: int) -> Batch:
    """Returns the batch with other tokens and positions where it is padding."""
    rng = np.random.default_rng(seed)
    padding = batch["segment_ids"] == 0
    shape = padding.shape
    return {
        **batch,
        "input_ids": _where(padding, rng.integers(0, vocab_size, shape), batch["input_ids"]),
        "positions": _where(padding, rng.integers(0, shape[1], shape), batch["positions"]),
    }


def with_other_document(batch: Batch, document: int, vocab_size: int, seed: int) -> Batch:
    """Returns the batch with other tokens in one of every row's documents, 1 or 2."""
    rng = np.random.default_rng(seed)
    inside = batch["segment_ids"] == document
    ids = rng.integers(0, vocab_size, inside.shape)
    return {**batch, "input_ids": _where(inside, ids, batch["input_ids"])}


def labels_of(batch: Batch, document: int) -> Batch:
    """Returns the batch, of which the loss counts one of every row's documents only, 1 or 2."""
    inside = batch["segment_ids"] == document
    follows = np.roll(batch["segment_ids"], -1, 1) == document
    follows[:, -1] = False
    labels = np.roll(batch["input_ids"], -1, 1)
    return {**batch, "target_labels": _where(inside & follows, labels, -1)}


def twice(batch: Batch) -> Batch:
    """Returns the first half of the rows, two times."""
    half = len(batch["input_ids"]) // 2
    return {name: np.concatenate([x[:half], x[:half]]) for name, x in batch.items()}


def once(batch: Batch) -> Batch:
    """Returns the first half of the rows, and as many of padding."""
    half = len(batch["input_ids"]) // 2
    padding = all_padding(batch)
    return {name: np.concatenate([x[:half], padding[name][half:]]) for name, x in batch.items()}


def all_padding(batch: Batch) -> Batch:
    """Returns a batch of padding only."""
    zeros = np.zeros_like(batch["segment_ids"])
    return {**batch, "segment_ids": zeros, "target_labels": zeros - 1}


def _arrays(**values: Any) -> Batch:
    return {name: np.asarray(value).astype(np.int32) for name, value in values.items()}


def _where(mask: Any, a: Any, b: Any) -> Any:
    return np.where(mask, a, b).astype(np.int32)
