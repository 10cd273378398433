"""The training input against the documents of its source, by a few lines that pack nothing."""

import itertools
import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from moelib.core.tree import Batch
from moelib.data.lm_input import InputMode, LMInput
from moelib.data.packing import DocumentBoundary
from moelib.train.settings import completed
from moelib.verify.compare import Difference, first_bit_difference
from moelib.verify.outcome import CheckFailedError, CheckSkippedError
from moelib.verify.reference import Reference

_MAX_TOKENS = 100_000  # Of sources whose epochs are read as a whole.


def data(known: Reference) -> None:
    """Checks targets, positions and segments, two whole epochs, and an evaluation.

    Each pair of a token and the next one of its document has to occur once per epoch.
    """
    source = known.probe.trainer.input
    if not isinstance(source, LMInput):
        raise CheckSkippedError(f"{type(source).__name__} is not packed by LMInput")
    carries_on = source.config.document_boundary is DocumentBoundary.CONTINUE
    steps = 4 if source.is_endless else min(4, source.num_batches)
    _check(_joined(source.batch(step) for step in range(steps)), carries_on)
    if not _is_small(source):
        reason = "a mixture, a large source, or one that ends"
        raise CheckSkippedError(f"{reason}: sequences of four batches only")
    want = _pairs_of_documents(source, carries_on)
    num, size = source.sequences_per_epoch, source.config.global_batch_size
    both = _joined(source.batch(step) for step in range(-(-2 * num // size)))
    for epoch in range(2):
        own = {name: x[epoch * num : (epoch + 1) * num] for name, x in both.items()}
        _compare_pairs(f"epoch {epoch}", want, own, carries_on)
    settings = completed(known.config).input.clone(mode=InputMode.EVALUATE, max_batches=None)
    evaluation = _joined(settings.instantiate().iterator())
    _compare_pairs("an evaluation", want, evaluation, carries_on)


def _is_small(source: Any) -> bool:
    """Returns whether an input repeats one source that is small enough to read as a whole."""
    return (
        isinstance(source, LMInput)
        and len(source.sources) == 1
        and source.sources[0].num_tokens <= _MAX_TOKENS
        and source.is_endless
    )


def _check(batch: Batch, carries_on: bool) -> None:
    """Checks targets, positions and segments of each sequence."""
    ids, labels, segments = (batch[n] for n in ("input_ids", "target_labels", "segment_ids"))
    before = np.pad(segments, ((0, 0), (1, 0)))[:, :-1]
    goes_on = (segments == before) & (segments > 0)
    begins = (segments > 0) & ~goes_on
    after_padding = (before == 0) & (np.arange(ids.shape[1]) > 0)
    positions = np.where(goes_on, np.roll(batch["positions"], 1, axis=1) + 1, 0)
    defects = {
        "padding has target_labels": (segments == 0) & (labels >= 0),
        "target_labels are not the tokens that follow input_ids": (
            goes_on[:, 1:] & (labels[:, :-1] != ids[:, 1:])
        ),
        "positions do not begin at 0 in each segment": (
            (segments > 0) & (batch["positions"] != positions)
        ),
        "segment_ids do not count from 1, with padding at the end": (
            begins & ((segments != before + 1) | after_padding)
        ),
        "a stream has a second segment": (segments > 1) & carries_on,
    }
    for text, where in defects.items():
        if where.any():
            raise CheckFailedError(f"input: {text}.")


def _pairs_of_documents(source: LMInput, carries_on: bool) -> Counter:
    tokens, found = source.sources[0], Counter[Any]()
    flat = np.concatenate([tokens.file(i) for i in range(len(tokens.file_starts) - 1)])
    for start, length in zip(tokens.starts.tolist(), tokens.lengths.tolist(), strict=True):
        ids = flat[start : start + length].tolist()
        found.update(ids if carries_on else itertools.pairwise(ids))
    return found


def _compare_pairs(what: str, want: Counter, batch: Batch, carries_on: bool) -> None:
    """Compares the pairs of an epoch; of a stream, whose order of documents is free, its tokens."""
    _check(batch, carries_on)
    valid = batch["target_labels"] >= 0
    ids, labels = (batch[name][valid].tolist() for name in ("input_ids", "target_labels"))
    got = Counter[Any](ids if carries_on else zip(ids, labels, strict=True))
    missing, added = want - got, got - want
    if added or missing.total() != (1 if carries_on else 0):  # Nothing follows a stream's end.
        raise CheckFailedError(
            f"input: {what} lacks {missing.total()} of {want.total()} tokens with their targets, "
            f"and has {added.total()} that are not in the documents, or repeated."
        )


def hosts(known: Reference) -> Difference | None:
    """Checks that batches depend on the step only: on 1, 2 and 4 hosts, and after a restore."""
    source: Any = known.probe.trainer.input
    size = known.config.input.global_batch_size
    if size % 2:
        raise CheckSkippedError(f"input.global_batch_size={size} does not divide over 2 hosts")
    begins = [1]
    if _is_small(source):
        begins.append(source.sequences_per_epoch // size + 2)  # In the second epoch.
    for num_hosts, begin in itertools.product((1, 2) if size % 4 else (1, 2, 4), begins):
        want = list(itertools.islice(source.iterator(), begin + 2))
        if len(want) <= begin:
            raise CheckSkippedError("the input has a single batch")
        hosts = [source.iterator(host, num_hosts) for host in range(num_hosts)]
        for batch in want[:begin]:
            if found := first_bit_difference(batch, _joined(map(next, hosts))):
                return found
        states = [json.loads(json.dumps(host.state())) for host in hosts]
        _joined(map(next, hosts))
        for host, state in zip(hosts, states, strict=True):
            host.restore(state)
        for batch in want[begin:]:
            if found := first_bit_difference(batch, _joined(map(next, hosts))):
                return found
    return None


def _joined(batches: Iterable[Batch]) -> Batch:
    """Returns all sequences of some batches as one batch."""
    parts = list(batches)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
