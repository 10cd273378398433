"""Plots of a report: what a category takes, split by the part of the step that it belongs to."""

from collections.abc import Sequence

from moelib.planning.report.step_report import PHASES, Share


def plot_shares(path: str, title: str, shares: Sequence[Share], unit: str, scale: float) -> None:
    """Writes a PNG with a bar for each category, in colours by phase if they have any.

    Args:
        path: Where.
        title: Above it.
        shares: What is shown; categories of less than a thousandth are left out.
        unit: Of the axis.
        scale: What an amount is divided by to be in that unit.
    """
    from matplotlib.figure import Figure

    sums = {s.category: sum(e.amount for e in shares if e.category == s.category) for s in shares}
    least = max(sums.values()) / 1000
    names = sorted((name for name in sums if sums[name] >= least), key=lambda name: sums[name])
    figure = Figure(figsize=(8, 1.5 + 0.4 * len(names)), layout="constrained")
    axes = figure.subplots()
    left = dict.fromkeys(names, 0.0)
    for part in ("", *PHASES):
        amounts = {s.category: s.amount / scale for s in shares if s.phase == part}
        widths = [amounts.get(name, 0.0) for name in names]
        if any(widths):
            axes.barh(names, widths, left=[left[name] for name in names], label=part or None)
            left = {name: left[name] + width for name, width in zip(names, widths, strict=True)}
    axes.set(xlabel=unit, title=title)
    if any(share.phase for share in shares):
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
