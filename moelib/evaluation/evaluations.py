"""Evaluations: what is to be scored, and the metrics that follow from the scores.

Those of several benchmarks and texts are scored together, so that few batches are compiled.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from moelib.core.context import Nested
from moelib.evaluation.requests import Request
from moelib.evaluation.scoring import Score, Scorer


class Metric(NamedTuple):
    """A number and its standard error, if it has one."""

    value: float
    stderr: float | None = None


class Evaluation(NamedTuple):
    """Requests with the function that makes metrics of their scores.

    Attributes:
        name: Of the benchmark or the text.
        requests: What is scored.
        metrics: Metrics by name, from the scores in the requests' order.
        settings: What else tells its results from others: JSON values by name.
    """

    name: str
    requests: Sequence[Request]
    metrics: Callable[[Sequence[Score]], Mapping[str, Metric]]
    settings: Mapping[str, Any]


def evaluate(
    scorer: Scorer,
    params: Nested,
    evaluations: Iterable[Evaluation],
    *,
    on_batch: Callable[[int], None] | None = None,
) -> dict[str, Mapping[str, Metric]]:
    """Returns the metrics of each evaluation by its name.

    Args:
        scorer: Of the model.
        params: The model's parameters.
        evaluations: Each with a name of its own.
        on_batch: As `Scorer.score` takes it.
    """
    evaluations = list(evaluations)
    requests = [request for evaluation in evaluations for request in evaluation.requests]
    scores = iter(scorer.score(params, requests, on_batch=on_batch))
    return {
        evaluation.name: evaluation.metrics([next(scores) for _ in evaluation.requests])
        for evaluation in evaluations
    }
