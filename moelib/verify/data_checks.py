"""The training input against the documents of its source, by a few lines that pack nothing."""

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from moelib.core.tree import Batch
from moelib.data.lm_input import InputMode, LMInput
from moelib.data.packing import DocumentBoundary
from moelib.train.settings import completed
from moelib.verify.compare import Difference, first_bit_difference
from moelib.verify.outcome import CheckFailedError, CheckSkippedError

_MAX_TOKENS = 100_000  # Of sources whose epochs are read as a whole.

Row = dict[str, np.ndarray]  # The arrays of one sequence.


def data(trainer: Any) -> Difference | None:
    """Checks targets, positions and segments, two whole epochs, an evaluation, and a restore.

    Each pair of a token and the next one of its document has to occur once per epoch.
    """
    source = trainer.input
    if not isinstance(source, LMInput):
        raise CheckSkippedError(f"{type(source).__name__} is not packed by LMInput")
    carries_on = source.config.document_boundary is DocumentBoundary.CONTINUE
    for step in range(4 if source.is_endless else min(4, source.num_batches)):
        for row in _rows(source.batch(step)):
            _check_row(row, carries_on)
    if len(source.sources) > 1 or source.sources[0].num_tokens > _MAX_TOKENS:
        raise CheckSkippedError("a mixture, or a large source: sequences of four batches only")
    if not source.is_endless:
        raise CheckSkippedError("an input that ends: sequences of four batches only")
    want = _pairs_of_documents(source, carries_on)
    size, per_epoch = source.config.global_batch_size, source.sequences_per_epoch
    rows = [row for step in range(-(-2 * per_epoch // size)) for row in _rows(source.batch(step))]
    for epoch in range(2):
        own = rows[epoch * per_epoch : (epoch + 1) * per_epoch]
        _compare_pairs(f"epoch {epoch}", want, own, carries_on)
    settings = completed(trainer.config).input.clone(mode=InputMode.EVALUATE, max_batches=None)
    rows = [row for batch in settings.instantiate().iterator() for row in _rows(batch)]
    _compare_pairs("an evaluation", want, rows, carries_on)
    return _restored(source, per_epoch // size + 2)


def _rows(batch: Batch) -> Iterator[Row]:
    names = ("input_ids", "target_labels", "segment_ids", "positions")
    for i in range(len(batch["input_ids"])):
        yield {name: batch[name][i] for name in names}


def _pieces(row: Row) -> Iterator[Row]:
    """Yields the parts of a sequence with one segment id, without padding."""
    ends = np.flatnonzero(np.diff(row["segment_ids"], append=-1)) + 1
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        if row["segment_ids"][begin]:
            yield {name: x[begin:end] for name, x in row.items()}


def _check_row(row: Row, carries_on: bool) -> None:
    padding = row["segment_ids"] == 0
    if (row["target_labels"][padding] >= 0).any():
        raise CheckFailedError("input: padding has target_labels.")
    numbers = []
    for piece in _pieces(row):
        numbers.append(int(piece["segment_ids"][0]))
        if (piece["target_labels"][:-1] != piece["input_ids"][1:]).any():
            raise CheckFailedError("input: target_labels are not the tokens that follow input_ids.")
        if (piece["positions"] != np.arange(len(piece["positions"]))).any():
            raise CheckFailedError("input: positions do not begin at 0 in each segment.")
    if numbers != list(range(1, len(numbers) + 1)) or (carries_on and len(numbers) > 1):
        raise CheckFailedError(f"input: a sequence has the segment_ids {numbers}.")


def _pairs_of_documents(source: LMInput, carries_on: bool) -> Counter:
    tokens, found = source.sources[0], Counter[Any]()
    flat = np.concatenate([tokens.file(i) for i in range(len(tokens.file_starts) - 1)])
    for start, length in zip(tokens.starts.tolist(), tokens.lengths.tolist(), strict=True):
        ids = flat[start : start + length].tolist()
        found.update(ids if carries_on else itertools.pairwise(ids))
    return found


def _compare_pairs(what: str, want: Counter, rows: list[Row], carries_on: bool) -> None:
    """Compares the pairs of an epoch; of a stream, whose order of documents is free, its tokens."""
    got = Counter[Any]()
    for row in rows:
        _check_row(row, carries_on)
        valid = row["target_labels"] >= 0
        ids, labels = (row[name][valid].tolist() for name in ("input_ids", "target_labels"))
        got.update(ids if carries_on else zip(ids, labels, strict=True))
    missing, added = want - got, got - want
    if added or missing.total() != (1 if carries_on else 0):  # Nothing follows a stream's end.
        raise CheckFailedError(
            f"input: {what} lacks {missing.total()} of {want.total()} tokens with their targets, "
            f"and has {added.total()} that are not in the documents, or repeated."
        )


def _restored(source: LMInput, step: int) -> Difference | None:
    """Compares, in the second epoch, batches of two hosts after a restore with whole batches."""
    before = source.iterator()
    for _ in range(step):
        next(before)
    state = json.loads(json.dumps(before.state()))
    num_hosts = 2 - source.config.global_batch_size % 2
    hosts = [source.iterator(host, num_hosts) for host in range(num_hosts)]
    for host in hosts:
        host.restore(state)
    for i in range(step, step + 2):
        parts = [next(host) for host in hosts]
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        if found := first_bit_difference(source.batch(i), joined):
            return found
    return None
