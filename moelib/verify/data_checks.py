"""The training input against the documents of its source, by a few lines that pack nothing."""

import itertools
import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from moelib.core.tree import Batch
from moelib.data.batches.lm_input import InputMode, LMInput
from moelib.data.batches.mixture import PERIOD
from moelib.data.batches.packing import DocumentBoundary, LongDocuments
from moelib.data.batches.synthetic import SyntheticTokens
from moelib.train.settings import completed
from moelib.verify.compare import Difference, first_bit_difference
from moelib.verify.outcome import CheckFailedError, CheckSkippedError
from moelib.verify.reference import Reference

_MAX_TOKENS = 100_000  # Of sources whose epochs are read as a whole.


def data(known: Reference) -> None:
    """Checks targets, positions and segments, two whole epochs, and an evaluation.

    Each pair of a token and the next one of its document has to occur once per epoch. A second
    epoch and another seed have another order. A mixture has each source's own sequences, in its
    share.
    """
    source = known.probe.trainer.input
    if not isinstance(source, LMInput):
        raise CheckSkippedError(f"{type(source).__name__} is not packed by LMInput")
    steps = 4 if source.is_endless else min(4, source.num_batches)
    _check(_joined(source.batch(step) for step in range(steps)), source)
    settings = completed(known.config).input
    if len(source.sources) > 1:
        _check_mixture(settings)
    elif _is_small(source):
        _check_epochs(settings)
    else:
        raise CheckSkippedError("a large source, or one that ends: sequences of four batches only")


def _check_epochs(settings: Any) -> None:
    """Checks two epochs and an evaluation, in sequences shorter than documents too."""
    lengths = {settings.seq_len}
    if settings.long_documents is LongDocuments.SPLIT:
        lengths.add(max(settings.seq_len // 4, 2))
    for seq_len in lengths:
        source = settings.clone(seq_len=seq_len).instantiate()
        want = _pairs_of_documents(source)
        num, size = source.sequences_per_epoch, settings.global_batch_size
        both = _joined(source.batch(step) for step in range(-(-2 * num // size)))
        epochs = [{n: x[i * num : (i + 1) * num] for n, x in both.items()} for i in range(2)]
        for i, epoch in enumerate(epochs):
            _compare_pairs(f"epoch {i}", want, epoch, source)
        other = settings.clone(seq_len=seq_len, mode=InputMode.EVALUATE, max_batches=None)
        _compare_pairs("an evaluation", want, _joined(other.instantiate().iterator()), source)
        if not _has_own_batches(source) or num < 8:  # Few sequences may be in the same order.
            continue
        reseeded = source.config.clone(seed=settings.seed + 1).instantiate()  # Same documents.
        third = _joined(reseeded.batch(step) for step in range(-(-num // size)))
        for what, epoch in (("epoch 1", epochs[1]), (f"seed={settings.seed + 1}", third)):
            if np.array_equal(epochs[0]["input_ids"], epoch["input_ids"][:num]):
                raise CheckFailedError(f"input: {what} has the order of epoch 0 of the seed.")


def _check_mixture(settings: Any) -> None:
    """Checks that sequences of a mixture are those of each source alone, one after another."""
    num, size, sources = 16, settings.global_batch_size, dict(settings.source.sources)
    for seed, (name, source) in enumerate(sources.items()):
        if source.klass is SyntheticTokens:  # Its documents would be those of the other sources.
            sources[name] = source.clone(seed=seed)
    total = sum(settings.source.weights.values())
    weights = {name: x / total for name, x in settings.source.weights.items()}
    alone = {name: _sequences(settings.clone(source=x), num) for name, x in sources.items()}
    mixture, counts = settings.source.clone(sources=sources), dict.fromkeys(weights, 0)
    for i, sequence in enumerate(_sequences(settings.clone(source=mixture), num)):
        names = [name for name in weights if alone[name][counts[name]] == sequence]
        if not names:
            raise CheckFailedError(
                f"input: sequence {i} of the mixture is the next one of none of its sources."
            )
        counts[max(names, key=lambda name: weights[name] * (i + 1) - counts[name])] += 1
    for name, weight in weights.items():
        if abs(counts[name] - weight * num * size) > 1 + num * size / PERIOD:
            raise CheckFailedError(
                f"input: the mixture has {counts[name]} of {num * size} sequences of {name!r}, "
                f"whose weight is {weight:g} of the sum."
            )


def _sequences(settings: Any, num_batches: int) -> list[bytes]:
    batches = _joined(map(settings.instantiate().batch, range(num_batches)))
    return [ids.tobytes() for ids in batches["input_ids"]]


def _is_small(source: Any) -> bool:
    """Returns whether an input repeats one source that is small enough to read as a whole."""
    return (
        isinstance(source, LMInput)
        and len(source.sources) == 1
        and source.sources[0].num_tokens <= _MAX_TOKENS
        and source.is_endless
    )


def _carries_on(source: LMInput) -> bool:
    return source.config.document_boundary is DocumentBoundary.CONTINUE


def _has_own_batches(source: LMInput) -> bool:
    return type(source).batch is LMInput.batch


def _without_loss(batch: Batch, source: LMInput) -> npt.NDArray[np.bool_]:
    """Returns where a subclass of LMInput leaves out targets, of prompts for example."""
    left_out = (batch["segment_ids"] > 0) & (batch["target_labels"] < 0)
    return left_out & (not _has_own_batches(source))


def _check(batch: Batch, source: LMInput) -> None:
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
            goes_on[:, 1:] & (labels[:, :-1] != ids[:, 1:]) & ~_without_loss(batch, source)[:, :-1]
        ),
        "positions do not begin at 0 in each segment": (
            (segments > 0) & (batch["positions"] != positions)
        ),
        "segment_ids do not count from 1, with padding at the end": (
            begins & ((segments != before + 1) | after_padding)
        ),
        "a stream has a second segment": (segments > 1) & _carries_on(source),
    }
    for text, where in defects.items():
        if where.any():
            raise CheckFailedError(f"input: {text}.")


def _pairs_of_documents(source: LMInput) -> Counter:
    tokens, found = source.sources[0], Counter[Any]()
    flat = np.concatenate([tokens.file(i) for i in range(len(tokens.file_starts) - 1)])
    for start, length in zip(tokens.starts.tolist(), tokens.lengths.tolist(), strict=True):
        ids = flat[start : start + length].tolist()
        found.update(ids if _carries_on(source) else itertools.pairwise(ids))
    return found


def _compare_pairs(what: str, want: Counter, batch: Batch, source: LMInput) -> None:
    """Compares the pairs of an epoch; of a stream, whose order of documents is free, its tokens."""
    _check(batch, source)
    carries_on, valid = _carries_on(source), batch["target_labels"] >= 0
    ids, labels = (batch[name][valid].tolist() for name in ("input_ids", "target_labels"))
    got = Counter[Any](ids if carries_on else zip(ids, labels, strict=True))
    missing, added = want - got, got - want
    free = int(carries_on) + int(_without_loss(batch, source).sum())  # A stream's end has no next.
    if added or missing.total() != free:
        raise CheckFailedError(
            f"input: {what} lacks {missing.total() - free} of {want.total()} tokens with their "
            f"targets, and has {added.total()} that are not in the documents, or repeated."
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
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
