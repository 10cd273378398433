"""Evaluations: requests to score, and the metrics that follow from the scores."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from moelib.core.tree import Nested
from moelib.evaluation.requests import Request
from moelib.evaluation.scoring import Score, Scorer


class Metric(NamedTuple):
    """A number and its standard error, if it has one."""

    value: float
    stderr: float | None = None


Metrics = Mapping[str, Metric]


class Evaluation(NamedTuple):
    """A benchmark or a text, tokenized."""

    name: str  # Name of the benchmark or the text.
    requests: Sequence[Request]  # Continuations to score.
    # Function from the scores, in the requests' order, to metrics by name.
    metrics: Callable[[Sequence[Score]], Metrics]
    settings: Mapping[str, Any]  # Settings that distinguish the results, as JSON values by name.


def run_evaluations(
    scorer: Scorer,
    params: Nested,
    evaluations: Sequence[Evaluation],
    *,
    on_batch: Callable[[int], None] | None = None,
) -> dict[str, Metrics]:
    """Returns the metrics of each evaluation by its name.

    The requests of all evaluations, whose names are distinct, are scored together, so that few
    batch shapes are compiled. `on_batch` is called as by `Scorer.score`.
    """
    requests = [request for evaluation in evaluations for request in evaluation.requests]
    scores = iter(scorer.score(params, requests, on_batch=on_batch))
    return {
        evaluation.name: evaluation.metrics([next(scores) for _ in evaluation.requests])
        for evaluation in evaluations
    }
