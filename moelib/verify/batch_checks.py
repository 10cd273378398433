"""Steps on changed batches: padding, repeated sequences and other documents must not matter."""

from typing import Any

import numpy as np

from moelib.core import tree
from moelib.core.tree import Batch
from moelib.verify import batches
from moelib.verify.compare import Difference, first_difference
from moelib.verify.outcome import CheckFailedError, CheckSkippedError
from moelib.verify.reference import (
    GRADIENT_TOLERANCE,
    TOLERANCE,
    Reference,
    drops_tokens,
    metric_name,
    rounding_floor,
    untrained_parameters,
)

# Metrics that are means over tokens, which repeated sequences do not change; losses are, too.
_MEANS = ("objective", "cross_entropy", "load_max_over_mean", "dead_experts", "entropy")


def masked(known: Reference) -> None:
    """Checks that sequences and batches of padding only give finite numbers."""
    known.check_tokens()
    for name, observed in (
        ("the batch, whose last sequence is padding", known.first),
        ("a batch of padding only", known.observe(batches.all_padding(known.batches[0]))),
    ):
        parts = {**observed.metrics, **tree.by_path(observed.gradients)}
        parts |= {f"new {path}": x for path, x in tree.flatten_items(observed.state.model)}
        for path, x in parts.items():
            if not np.all(np.isfinite(np.asarray(x, np.float64))):
                raise CheckFailedError(f"{path} is not finite for {name}.")


def padding(known: Reference) -> Difference | None:
    """Checks that the content of padding changes nothing."""
    known.check_tokens()
    batch, vocab_size = known.batches[0], batches.vocab_size(known.config)
    return _compare(known, batch, batches.with_other_segment(batch, 0, vocab_size, seed=5))


def doubled(known: Reference) -> Difference | None:
    """Checks that repeated sequences weigh as much as the same ones once, plus padding."""
    known.check_tokens()
    batch = known.batches[0]
    if (batch_size := len(batch["input_ids"])) % 2:
        raise CheckSkippedError(f"input.global_batch_size={batch_size} is odd")
    if known.is_random:
        raise CheckSkippedError("the step draws different random numbers for each sequence")
    if drops_tokens(known.first.metrics):
        raise CheckSkippedError("tokens are dropped")
    twice, once = batches.first_half_twice(batch), batches.first_half_padded(batch)
    return _compare(known, twice, once, copies=2)


def packing(known: Reference) -> Difference | None:
    """Checks that a document's loss does not depend on other documents of its sequence."""
    known.check_tokens()
    for layer, _ in known.probe.trainer.model.walk():
        if layer.mixes_documents:
            raise CheckSkippedError(f"{layer.path()} mixes documents by design")
    for mine, other in ((1, 2), (2, 1)):
        batch = _before_updates(known, batches.with_loss_of(known.batches[0], mine))
        vocab_size = batches.vocab_size(known.config)
        changed = batches.with_other_segment(batch, other, vocab_size, seed=6)
        metrics = [known.observe(each).metrics for each in (batch, changed)]
        if any(map(drops_tokens, metrics)):
            raise CheckSkippedError("which tokens are dropped depends on the whole sequence")
        want, got = ({f"loss of documents {mine}": each["loss"]} for each in metrics)
        if found := first_difference(want, got, relative=TOLERANCE):
            return found
    return None


def causality(known: Reference) -> Difference | None:
    """Checks that the loss of the tokens up to a position does not depend on later tokens."""
    known.check_tokens()
    for layer, _ in known.probe.trainer.model.walk():
        if layer.looks_ahead or layer.mixes_documents:
            raise CheckSkippedError(f"{layer.path()} depends on later tokens by design")
    seq_len = known.config.input.seq_len
    for position in (seq_len // 4, seq_len // 2, 3 * seq_len // 4):
        batch = _before_updates(known, batches.with_loss_until(known.batches[0], position))
        vocab_size = batches.vocab_size(known.config)
        changed = batches.with_other_tokens_after(batch, position, vocab_size, seed=7)
        metrics = [known.observe(each).metrics for each in (batch, changed)]
        if any(map(drops_tokens, metrics)):
            raise CheckSkippedError("which tokens are dropped depends on the whole sequence")
        text = f"loss of tokens 0 to {position}, with other tokens after them"
        if found := first_difference(*({text: x["loss"]} for x in metrics), relative=TOLERANCE):
            return found
    return None


def _before_updates(known: Reference, batch: Batch) -> Batch:
    """Returns a batch with a loss in its first micro-batch only, before layers update their state.

    Documents of a micro-batch may influence the next ones by a moving average.
    """
    labels = batch["target_labels"].copy()
    labels[np.arange(len(labels)) % known.config.num_microbatches > 0] = -1
    return batch | {"target_labels": labels}


def _compare(known: Reference, a: Any, b: Any, copies: int = 1) -> Difference | None:
    """Compares losses, loads, gradients and updates of layers of two batches.

    State of layers may change by `copies` times as much for the first one: a count of tokens.
    """
    want, got = known.observe(a), known.observe(b)
    is_mean = lambda path: metric_name(path) in _MEANS or metric_name(path).endswith("loss")
    metrics = [{path: x for path, x in o.metrics.items() if is_mean(path)} for o in (want, got)]
    if found := first_difference(*metrics, relative=TOLERANCE, floor=1e-7):
        return found
    pair, floor = (want.gradients, got.gradients), rounding_floor(want.gradients, a)
    if found := first_difference(*pair, relative=GRADIENT_TOLERANCE, floor=floor):
        return found
    states = (known.start.model, want.state.model, got.state.model)
    start, twice, once = (untrained_parameters(x, want.gradients) for x in states)
    for path, x in once.items():
        counted = start[path] + copies * (x - start[path])
        if first_difference({path: counted}, {path: twice[path]}, relative=TOLERANCE) and (
            found := first_difference({path: twice[path]}, {path: x}, relative=TOLERANCE)
        ):
            return found
    return None
