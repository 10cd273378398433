"""Figures of the metrics of runs."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from moelib.core.errors import UserError
from moelib.runs.curves import RunMetrics
from moelib.runs.metrics_file import MetricsReader
from moelib.runtime.figures import shown_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure_of_runs(runs: Sequence[str], names: Sequence[str]) -> "Figure":
    """Returns a picture of metrics over steps.

    Metrics with the same last part of their names, such as `mean_loss` and `validation/loss`, share
    a panel. A line is the mean of neighboring steps, in a band from their least to their largest
    value.

    Args:
        runs: Folders of the runs.
        names: Names of the metrics.

    Raises:
        UserError: If no run has a metric.
    """
    curves = {run: RunMetrics(MetricsReader(run, names)) for run in runs}
    for each in curves.values():
        each.update()
    panels: dict[str, list[str]] = {}
    for name in names:
        if not any(name in each.curves for each in curves.values()):
            raise UserError(f"metrics (--metrics={name}): none of the runs has this metric.")
        panels.setdefault(re.sub(r".*/|^mean_", "", name), []).append(name)
    figure = shown_figure(figsize=(7, 0.6 + 3 * len(panels)), layout="constrained")
    grid = figure.subplots(len(panels), squeeze=False)[:, 0]
    for axes, (title, group) in zip(grid, panels.items(), strict=True):
        for i, (run, each) in enumerate(curves.items()):
            for style, name in zip(("-", "--", "-.", ":") * len(group), group, strict=False):
                points = each.curves[name].points() if name in each.curves else []
                steps, mean, least, most = zip(*points, strict=True) if points else [()] * 4
                label = name if len(runs) == 1 else f"{run}: {name}"
                marker = "o" if len(points) <= 30 else None
                axes.plot(steps, mean, style, color=f"C{i}", marker=marker, ms=3, label=label)
                axes.fill_between(steps, least, most, color=f"C{i}", alpha=0.2, lw=0)
        axes.set(xlabel="step", ylabel=title)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    return figure
