"""The batches of an epoch against the documents of its source, by a few lines that pack nothing."""

import itertools
from collections import Counter
from typing import Any

import numpy as np

from moelib.core.tree import Batch
from moelib.data.batches.lm_input import InputMode, LMInput
from moelib.data.batches.mixture import PERIOD
from moelib.data.batches.packing import DocumentBoundary, LongDocuments
from moelib.data.batches.synthetic import SyntheticTokens


def check_epochs(settings: Any) -> None:
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
        if num < 8:  # Few sequences may be in the same order.
            continue
        reseeded = source.config.clone(seed=settings.seed + 1).instantiate()  # Same documents.
        third = _joined(reseeded.batch(step) for step in range(-(-num // size)))
        for what, epoch in (("epoch 1", epochs[1]), (f"seed={settings.seed + 1}", third)):
            if np.array_equal(epochs[0]["input_ids"], epoch["input_ids"][:num]):
                raise AssertionError(f"input: {what} has the order of epoch 0 of the seed.")


def check_mixture(settings: Any) -> None:
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
            raise AssertionError(
                f"input: sequence {i} of the mixture is the next one of none of its sources."
            )
        counts[max(names, key=lambda name: weights[name] * (i + 1) - counts[name])] += 1
    for name, weight in weights.items():
        if abs(counts[name] - weight * num * size) > 1 + num * size / PERIOD:
            raise AssertionError(
                f"input: the mixture has {counts[name]} of {num * size} sequences of {name!r}, "
                f"whose weight is {weight:g} of the sum."
            )


def _sequences(settings: Any, num_batches: int) -> list[bytes]:
    batches = _joined(map(settings.instantiate().batch, range(num_batches)))
    return [ids.tobytes() for ids in batches["input_ids"]]


def _pairs_of_documents(source: LMInput) -> Counter:
    tokens, found = source.sources[0], Counter[Any]()
    flat = np.concatenate([tokens.file(i) for i in range(len(tokens.file_starts) - 1)])
    for start, length in zip(tokens.starts.tolist(), tokens.lengths.tolist(), strict=True):
        ids = flat[start : start + length].tolist()
        found.update(ids if _carries_on(source) else itertools.pairwise(ids))
    return found


def _compare_pairs(what: str, want: Counter, batch: Batch, source: LMInput) -> None:
    """Compares the pairs of an epoch; of a stream, whose order of documents is free, its tokens."""
    carries_on, valid = _carries_on(source), batch["target_labels"] >= 0
    ids, labels = (batch[name][valid].tolist() for name in ("input_ids", "target_labels"))
    got = Counter[Any](ids if carries_on else zip(ids, labels, strict=True))
    missing, added = want - got, got - want
    free = int(carries_on)  # A stream's end has no next.
    if added or missing.total() != free:
        raise AssertionError(
            f"input: {what} lacks {missing.total() - free} of {want.total()} tokens with their "
            f"targets, and has {added.total()} that are not in the documents, or repeated."
        )


def _carries_on(source: LMInput) -> bool:
    return source.config.document_boundary is DocumentBoundary.CONTINUE


def _joined(batches: Any) -> Batch:
    parts = list(batches)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
