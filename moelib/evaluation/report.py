"""What an evaluation leaves: a table, results.json, results.csv, and a plot over steps."""

import csv
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from moelib.evaluation.evaluations import Metric


class Result(NamedTuple):
    """A number of a checkpoint.

    Attributes:
        step: Of the checkpoint.
        tokens: The run had read by then, padding included; None if that is not known.
        task: A benchmark or a text.
        metric: What was measured.
        value: The number.
        stderr: Its standard error, if it has one.
    """

    step: int
    tokens: int | None
    task: str
    metric: str
    value: float
    stderr: float | None


def results_of(
    step: int, tokens: int | None, found: Mapping[str, Mapping[str, Metric]]
) -> list[Result]:
    """Returns the metrics of each task at a step, one after another."""
    return [
        Result(step, tokens, task, name, *metric)
        for task, metrics in found.items()
        for name, metric in metrics.items()
    ]


def write_results(folder: str, results: Sequence[Result], settings: Mapping[str, Any]) -> None:
    """Writes results.json, with the settings, and results.csv into a folder that exists."""
    with open(os.path.join(folder, "results.json"), "w", encoding="utf-8") as file:
        json.dump({**settings, "results": [r._asdict() for r in results]}, file, indent=2)
        file.write("\n")
    with open(os.path.join(folder, "results.csv"), "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Result._fields)
        writer.writerows(results)


def print_results(title: str, results: Sequence[Result]) -> None:
    """Prints a table to stdout: a row for each task and step, a column for each metric."""
    from rich import box, console, table

    metrics = list(dict.fromkeys(result.metric for result in results))
    shown = table.Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for name in ("task", "step", *metrics):
        shown.add_column(name, justify="left" if name == "task" else "right", overflow="fold")
    rows: dict[tuple[str, int], dict[str, Result]] = {}
    for result in results:
        rows.setdefault((result.task, result.step), {})[result.metric] = result
    order = {task: i for i, task in enumerate(dict.fromkeys(task for task, _ in rows))}
    last = None
    for task, step in sorted(rows, key=lambda row: (order[row[0]], row[1])):
        if last not in (None, task):
            shown.add_section()
        cells = rows[task, step]
        texts = [_text(cells[metric]) if metric in cells else "" for metric in metrics]
        shown.add_row("" if task == last else task, str(step), *texts)
        last = task
    width = None if sys.stdout.isatty() else 120  # A file has none of its own.
    console.Console(highlight=False, markup=False, width=width).print(shown)


def _text(result: Result) -> str:
    value = f"{result.value:.4f}" if abs(result.value) < 1000 else f"{result.value:.4g}"
    return value if result.stderr is None else f"{value} ± {result.stderr:.4f}"


def plot_results(path: str, title: str, results: Sequence[Result]) -> None:
    """Writes a PNG: for each metric, how it changes over steps, one line a task.

    Bars are standard errors. If they are known, tokens stand above. To be called with two steps
    or more.
    """
    from matplotlib.figure import Figure

    metrics = list(dict.fromkeys(result.metric for result in results))
    figure = Figure(figsize=(5 * len(metrics), 4), layout="constrained")
    figure.suptitle(title)
    for axes, metric in zip(
        figure.subplots(1, len(metrics), squeeze=False)[0], metrics, strict=True
    ):
        of_metric = sorted((r for r in results if r.metric == metric), key=lambda r: r.step)
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
        _show_tokens(axes, results)
    figure.savefig(path, dpi=120)


def _show_tokens(axes: Any, results: Sequence[Result]) -> None:
    known = [r.tokens / r.step for r in results if r.tokens and r.step]
    if known:
        scale = known[0]
        axes.secondary_xaxis(
            "top", functions=(lambda step: step * scale, lambda tokens: tokens / scale)
        ).set_xlabel("tokens")
