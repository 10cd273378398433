"""Results of an evaluation: a table, results.json, results.csv, and a plot over steps."""

import csv
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from moelib.evaluation.evaluations import Metrics
from moelib.runtime import storage
from moelib.runtime.figures import save_figure
from moelib.runtime.storage import atomic_file, write_json
from moelib.runtime.table import Table

RESULTS_FILE = "results.json"


class Result(NamedTuple):
    """A metric of a checkpoint."""

    step: int | None  # Training step of the checkpoint; None for a published model.
    tokens: int | None  # Number of tokens read by then, padding included; None if unknown.
    task: str  # Name of the benchmark or the text.
    metric: str  # Name of the metric.
    value: float  # The metric.
    stderr: float | None  # Its standard error, if it has one.


def results_of(step: int | None, tokens: int | None, found: Mapping[str, Metrics]) -> list[Result]:
    """Returns the metrics of each task at a step, one after another."""
    return [
        Result(step, tokens, task, name, *metric)
        for task, metrics in found.items()
        for name, metric in metrics.items()
    ]


def write_results(
    folder: str, title: str, results: Sequence[Result], settings: Mapping[str, Any]
) -> None:
    """Writes results.json, with the settings, results.csv and, of several steps, results.png.

    A value that is not finite is null in results.json.

    The folder is created if it does not exist; the title is that of the plot.
    """
    storage.make_folder(folder)
    # JSON has no infinity, which the perplexity of a long word may be.
    plain = [r._asdict() | ({} if math.isfinite(r.value) else {"value": None}) for r in results]
    content = {**settings, "results": plain}
    write_json(os.path.join(folder, RESULTS_FILE), content)
    with atomic_file(os.path.join(folder, "results.csv")) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Result._fields)
        writer.writerows(results)
    if len({result.step for result in results}) > 1:
        plot_results(os.path.join(folder, "results.png"), title, results)


def results_table(title: str, results: Sequence[Result]) -> Table:
    """Returns a table with a row per task and step, and a column per metric."""
    metrics = list(dict.fromkeys(result.metric for result in results))
    rows: list[list[str]] = []
    for task in dict.fromkeys(result.task for result in results):
        by_step: dict[int | None, dict[str, str]] = {}
        for result in results:
            if result.task == task:
                by_step.setdefault(result.step, {})[result.metric] = _text(result)
        rows += [[]] if rows else []
        for i, (step, cells) in enumerate(by_step.items()):
            head = ["" if i else task, "" if step is None else str(step)]
            rows.append(head + [cells.get(metric, "") for metric in metrics])
    return Table(title, ("task", "step>", *(f"{metric}>" for metric in metrics)), rows)


def _text(result: Result) -> str:
    value = f"{result.value:.4f}" if abs(result.value) < 1000 else f"{result.value:.4g}"
    return value if result.stderr is None else f"{value} ± {result.stderr:.4f}"


def plot_results(path: str, title: str, results: Sequence[Result]) -> None:
    """Writes a PNG of each metric over steps, with a line per task, for two steps or more.

    Error bars are standard errors. A second axis shows the tokens read, if they are known.
    """
    from matplotlib.figure import Figure

    metrics = list(dict.fromkeys(result.metric for result in results))
    figure = Figure(figsize=(5 * len(metrics), 4), layout="constrained")
    figure.suptitle(title)
    for axes, metric in zip(
        figure.subplots(1, len(metrics), squeeze=False)[0], metrics, strict=True
    ):
        of_metric = sorted((r for r in results if r.metric == metric), key=lambda r: r.step or 0)
        for task in dict.fromkeys(result.task for result in of_metric):
            line = [result for result in of_metric if result.task == task]
            axes.errorbar(
                [result.step for result in line],
                [result.value for result in line],
                yerr=[result.stderr or 0.0 for result in line],
                label=task,
                marker="o",
                capsize=2,
            )
        axes.set(xlabel="step", ylabel=metric)
        axes.legend(fontsize="small")
        _add_token_axis(axes, results)
    save_figure(figure, path)


def _add_token_axis(axes: Any, results: Sequence[Result]) -> None:
    scales = {r.tokens / r.step if r.tokens and r.step else None for r in results}
    if len(scales) == 1 and (scale := scales.pop()) is not None:
        axes.secondary_xaxis(
            "top", functions=(lambda step: step * scale, lambda tokens: tokens / scale)
        ).set_xlabel("tokens")
