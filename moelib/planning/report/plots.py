"""Plots of a report: amounts of categories, split by phase of the step."""

from collections.abc import Sequence

from moelib.planning.hlo.source import PHASES
from moelib.planning.report.step_report import Share


def plot_shares(path: str, title: str, shares: Sequence[Share], unit: str, scale: float) -> None:
    """Writes a PNG with a bar for each category, colored by phase.

    Amounts are divided by `scale` to be in `unit`. Categories below a thousandth of the largest are
    not shown.
    """
    from matplotlib.figure import Figure

    sums = {s.category: sum(e.amount for e in shares if e.category == s.category) for s in shares}
    least = max(sums.values()) / 1000
    names = sorted((name for name in sums if sums[name] >= least), key=lambda name: sums[name])
    figure = Figure(figsize=(8, 1.5 + 0.4 * len(names)), layout="constrained")
    axes = figure.subplots()
    left = dict.fromkeys(names, 0.0)
    for phase in ("", *PHASES):
        amounts = {s.category: s.amount / scale for s in shares if s.phase == phase}
        widths = [amounts.get(name, 0.0) for name in names]
        if any(widths):
            axes.barh(names, widths, left=[left[name] for name in names], label=phase or None)
            left = {name: left[name] + width for name, width in zip(names, widths, strict=True)}
    axes.set(xlabel=unit, title=title)
    if any(share.phase for share in shares):
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
