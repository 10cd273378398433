"""Runs compared: lines of their configs, metrics at the same steps, and plots."""

import math
from collections.abc import Mapping, Sequence

from moelib.core.config_text import text_lines
from moelib.core.errors import UserError
from moelib.runs.figure import figure_of_runs
from moelib.runs.folder import RunFolder
from moelib.runs.metrics_file import read_metrics
from moelib.runtime.figures import save_figure
from moelib.runtime.storage import read_text
from moelib.runtime.table import Table

_MAX_VALUES = 1000  # Values of a metric in memory; half are dropped at more.


def config_differences(runs: Sequence[str]) -> dict[str, tuple[bool, list[str | None]]]:
    """Returns the lines in which the configs of runs differ.

    Args:
        runs: Folders of the runs.

    Returns:
        {path: (whether it determines the numbers of a run, value in each run or None)}.

    Raises:
        UserError: If a config.txt is missing or cannot be read.
    """
    from moelib.runs.identity import identity
    from moelib.train.trainer import SpmdTrainer

    texts = [read_text(RunFolder(run).config_file) for run in runs]
    values = list(map(text_lines, texts))
    trainer = SpmdTrainer.default_config()
    decisive = {path for text in texts for path in identity(text, trainer)}
    rows = {path: [each.get(path) for each in values] for each in values for path in each}
    return {path: (path in decisive, x) for path, x in rows.items() if len(set(x)) > 1}


def values_by_step(run: str, names: Sequence[str]) -> dict[str, dict[int, float]]:
    """Returns {metric: {step: value}} of a run: of a long one, multiples of a power of two only.

    The last value is always there.
    """
    found: dict[str, dict[int, float]] = {name: {} for name in names}
    strides, last = dict.fromkeys(names, 1), {}
    for line in read_metrics(run, names):
        step = line["step"]
        for name in [name for name in names if isinstance(line.get(name), int | float)]:
            values, last[name] = found[name], (step, line[name])
            if step % strides[name] == 0:
                values[step] = line[name]
            while len(values) > _MAX_VALUES:
                strides[name] *= 2
                values = {s: x for s, x in values.items() if s % strides[name] == 0}
                found[name] = values
    for name, (step, value) in last.items():
        found[name][step] = value
    return found


def metrics_at_same_steps(
    runs: Sequence[str], names: Sequence[str], num_steps: int = 12
) -> dict[str, dict[int, list[float]]]:
    """Returns {metric: {step: value in each run}}, at most `num_steps` steps of each metric.

    They are spread evenly over the steps at which all runs have the metric.

    Raises:
        UserError: If no run has a metric.
    """
    found = [values_by_step(run, names) for run in runs]
    rows: dict[str, dict[int, list[float]]] = {}
    for name in names:
        each = [values[name] for values in found]
        if not any(each):
            raise UserError(f"--metrics={name}: none of the runs has this metric.")
        steps = sorted(set.intersection(*map(set, each)))
        count = min(num_steps, len(steps))
        chosen = [steps[math.ceil((i + 1) * len(steps) / count) - 1] for i in range(count)]
        rows[name] = {step: [values[step] for values in each] for step in chosen}
    return rows


def comparison_tables(
    runs: Sequence[str],
    configs: Mapping[str, tuple[bool, list[str | None]]],
    metrics: Mapping[str, Mapping[int, Sequence[float]]],
) -> list[Table]:
    """Returns a table of the configs, and one of each metric with the difference to the first."""
    cells = lambda values: ["not set" if x is None else x for x in values]
    rows = [[path, "yes" if decisive else "", *cells(x)] for path, (decisive, x) in configs.items()]
    note = "Numbers: whether the line determines the numbers of a run, apart from its length."
    tables = [Table("Config", ["path", "numbers", *runs], rows, [note])]
    further = [f"{run} - {runs[0]}>" for run in runs[1:]]
    for name, steps in metrics.items():
        rows = []
        for step, values in steps.items():
            differences = (f"{x - values[0]:+.4g}" for x in values[1:])
            rows.append([f"{step:,}", *(f"{x:.5g}" for x in values), *differences])
        notes = [] if rows else ["There is no step at which all runs have it."]
        tables.append(Table(name, ["step>", *(f"{run}>" for run in runs), *further], rows, notes))
    return tables


def plot_runs(image: str, runs: Sequence[str], names: Sequence[str]) -> None:
    """Writes the figure of `figure_of_runs`, in the format of the path's ending.

    Raises:
        UserError: If no run has a metric.
    """
    save_figure(figure_of_runs(runs, names), image)
