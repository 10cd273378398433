"""Plots of a report: amounts by kind, split by phase of the step."""

from collections.abc import Mapping

from moelib.planning.hlo.source import PHASES
from moelib.runtime.figures import save_figure


def plot_amounts(
    path: str, title: str, amounts: Mapping[tuple[str, str], float], unit: str
) -> None:
    """Writes a PNG with a bar for each kind, colored by phase.

    Kinds below a thousandth of the largest are not shown.

    Args:
        path: Path of the PNG.
        title: Title of the plot.
        amounts: Amounts by kind and phase; the phase may be "".
        unit: Unit of the amounts.
    """
    from matplotlib.figure import Figure

    kinds = {kind for kind, _ in amounts}
    sums = {kind: sum(x for (k, _), x in amounts.items() if k == kind) for kind in kinds}
    names = sorted((k for k in kinds if sums[k] >= max(sums.values()) / 1000), key=sums.__getitem__)
    figure = Figure(figsize=(8, 1.5 + 0.4 * len(names)), layout="constrained")
    axes = figure.subplots()
    left = dict.fromkeys(names, 0.0)
    for phase in ("", *PHASES):
        widths = [amounts.get((name, phase), 0.0) for name in names]
        if any(widths):
            axes.barh(names, widths, left=[left[name] for name in names], label=phase or None)
            left = {name: left[name] + width for name, width in zip(names, widths, strict=True)}
    axes.set(xlabel=unit, title=title)
    if any(phase for _, phase in amounts):
        axes.legend(fontsize="small")
    save_figure(figure, path)
