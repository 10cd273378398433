"""The training input: sequences of documents, and batches that depend on the step only."""

import itertools
import json
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from moelib.core.tree import Batch
from moelib.data.batches.lm_input import LMInput
from moelib.data.batches.packing import DocumentBoundary
from moelib.verify.compare import Difference, first_bit_difference
from moelib.verify.outcome import CheckFailedError, CheckSkippedError
from moelib.verify.reference import Reference

_MAX_TOKENS = 100_000  # Of sources whose second epoch is read.


def data(known: Reference) -> None:
    """Checks targets, positions and segments of four batches."""
    source = known.probe.trainer.input
    if not isinstance(source, LMInput):
        raise CheckSkippedError(f"{type(source).__name__} is not packed by LMInput")
    steps = 4 if source.is_endless else min(4, source.num_batches)
    check_sequences(_joined(source.batch(step) for step in range(steps)), source)


def _is_small(source: Any) -> bool:
    """Returns whether an input repeats one source that is small enough to read as a whole."""
    return (
        isinstance(source, LMInput)
        and len(source.sources) == 1
        and source.sources[0].num_tokens <= _MAX_TOKENS
        and source.is_endless
    )


def check_sequences(batch: Batch, source: LMInput) -> None:
    """Checks targets, positions and segments of each sequence.

    A subclass of LMInput may have batches without some targets, of prompts for example.
    """
    is_stream = source.config.document_boundary is DocumentBoundary.CONTINUE
    has_own_batches = type(source).batch is not LMInput.batch
    ids, labels, segments = (batch[n] for n in ("input_ids", "target_labels", "segment_ids"))
    before = np.pad(segments, ((0, 0), (1, 0)))[:, :-1]
    goes_on = (segments == before) & (segments > 0)
    begins = (segments > 0) & ~goes_on
    after_padding = (before == 0) & (np.arange(ids.shape[1]) > 0)
    positions = np.where(goes_on, np.roll(batch["positions"], 1, axis=1) + 1, 0)
    defects = {
        "padding has target_labels": (segments == 0) & (labels >= 0),
        "target_labels are not the tokens that follow input_ids": (
            goes_on[:, 1:]
            & (labels[:, :-1] != ids[:, 1:])
            & ~(has_own_batches & (labels[:, :-1] < 0))
        ),
        "positions do not begin at 0 in each segment": (
            (segments > 0) & (batch["positions"] != positions)
        ),
        "segment_ids do not count from 1, with padding at the end": (
            begins & ((segments != before + 1) | after_padding)
        ),
        "a stream has a second segment": (segments > 1) & is_stream,
    }
    for text, where in defects.items():
        if where.any():
            raise CheckFailedError(f"input: {text}.")


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
        rows = size // num_hosts
        hosts = [source.iterator(range(i, i + rows)) for i in range(0, size, rows)]
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
    return jax.tree.map(lambda *each: np.concatenate(each), *parts)
