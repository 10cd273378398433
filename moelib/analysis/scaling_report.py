"""The report of scaling laws: JSON, a plot, and Markdown."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from moelib.analysis.isoflop import Interval, IsoFlopFit, group_by_budget
from moelib.analysis.report import write_files
from moelib.analysis.scaling_laws import COUNTS, NAMES, ScalingAnalysis, ScalingFit
from moelib.runtime.table import Table, to_markdown


def write_report(folder: str, analysis: ScalingAnalysis, *, metric: str) -> list[str]:
    """Writes the files of a report into a folder, and returns their paths.

    Args:
        folder: Folder, which is made if it is missing.
        analysis: The scaling laws.
        metric: Name of the loss.
    """
    numbers = {"metric": metric, **dataclasses.asdict(analysis)}
    paragraphs = [
        "# Scaling laws",
        f"{len(analysis.runs)} runs, loss `{metric}`, N: active parameters, D: tokens, C: FLOPs.",
        "![Loss over parameters, and the best parameters over FLOPs](scaling.svg)",
    ]
    for table in tables(analysis):
        paragraphs += [f"## {table.title}", to_markdown(table)]
    return write_files(folder, {"scaling": (numbers, plot(analysis))}, paragraphs)


def tables(analysis: ScalingAnalysis) -> list[Table]:
    """Returns the laws, minima and predictions with both ways of counting, and excluded runs."""
    fits = analysis.fits
    found = [_laws(fits), _minima(fits)]
    if any(fit.predictions for fit in fits.values()):
        found.append(_predictions(fits))
    rows = [[name, reason] for name, reason in analysis.excluded.items()]
    return [*found, Table("Excluded runs", ["run", "reason"], rows)]


def _laws(fits: dict[str, ScalingFit]) -> Table:
    known = fits.values()
    laws = [fit.isoflop.law for fit in known]
    isoflop = ["-" if law is None else _value(law.exponent, law.interval) for law in laws]
    parametric = [_value(fit.parametric.exponent, fit.intervals["a"]) for fit in known]
    rows = [["N_opt ~ C^a, IsoFLOP", *isoflop], ["N_opt ~ C^a, parametric", *parametric]]
    for name in (*NAMES, "kappa", "gamma"):
        pairs = [(getattr(fit.parametric, name), fit.intervals.get(name)) for fit in known]
        rows.append([name, *(_value(*pair) for pair in pairs)])
    law = "L = E + A / N^alpha + B / D^beta, where C = kappa N^gamma D"
    notes = [f"Parametric: {law}. In brackets: 2.5th to 97.5th percentile of the bootstrap."]
    notes += [
        f"N {name}: {fit.parametric.problem}."
        for name, fit in fits.items()
        if fit.parametric.problem
    ]
    notes += [
        f"N {name}: {fit.isoflop.without_minimum:.0%} of the bootstraps have no minimum at a "
        "budget, and are missing in the interval of IsoFLOP."
        for name, fit in fits.items()
        if fit.isoflop.without_minimum
    ]
    notes += [f"N {name}: {text}" for name, fit in fits.items() if (text := _disagreement(fit))]
    return Table("Laws", ["", *(f"N {name}>" for name in fits)], rows, notes)


def _disagreement(fit: ScalingFit) -> str:
    """Returns a sentence if the intervals of the exponent by the two methods are disjoint."""
    if fit.isoflop.law is None or fit.isoflop.law.interval is None:
        return ""
    (a, b), (c, d) = fit.isoflop.law.interval, fit.intervals["a"]
    return (
        "" if a <= d and c <= b else "the two methods disagree on a: their intervals are disjoint."
    )


def _minima(fits: dict[str, ScalingFit]) -> Table:
    rows = []
    for name, fit in fits.items():
        for p in fit.isoflop.parabolas:
            best = fit.parametric.optimum(p.budget)
            found = ["-", "-"] if p.parameters is None else [f"{p.parameters:.4g}", f"{p.loss:.4f}"]
            others = [f"{best[0]:.4g}", f"{best[2]:.4f}", p.problem]
            rows.append([f"{p.budget:.3g}", name, str(p.num_runs), *found, *others])
    columns = [
        "C>",
        "N",
        "runs>",
        "N_opt>",
        "loss>",
        "parametric N_opt>",
        "loss>",
        "not used: reason",
    ]
    return Table("Minima of the budgets", columns, rows)


def _predictions(fits: dict[str, ScalingFit]) -> Table:
    rows = []
    for name, fit in fits.items():
        for p in fit.predictions:
            both = zip(p.parametric, p.parametric_interval, strict=True)
            n, d, loss = (_value(value, interval) for value, interval in both)
            head = [f"{p.budget:.3g}", f"{p.times_largest:.3g}", name]
            rows.append([*head, "parametric", n, d, loss])
            if p.isoflop is not None:
                rows.append([*head, "IsoFLOP", *(f"{value:.4g}" for value in p.isoflop)])
    columns = ["C>", "C / largest C>", "N", "method", "N_opt>", "D_opt>", "loss>"]
    notes = ["IsoFLOP: the loss is that of the parametric law at this N and D."]
    return Table("The best model for a budget", columns, rows, notes)


def _value(value: float, interval: Interval | None) -> str:
    return f"{value:.4g}" + (f" [{interval[0]:.4g}, {interval[1]:.4g}]" if interval else "")


def plot(analysis: ScalingAnalysis) -> Any:
    """Returns a figure: for both ways of counting, loss over N per budget, and N_opt over C."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    grid = figure.subplots(2, 2, squeeze=False)
    flops = np.asarray([run.flops for run in analysis.runs])
    losses = np.asarray([run.loss for run in analysis.runs])
    for (left, right), (name, fit) in zip(grid, analysis.fits.items(), strict=True):
        n = np.asarray([getattr(run, COUNTS[name]) for run in analysis.runs])
        _plot_losses(left, fit.isoflop, flops, n, losses)
        left.set(xscale="log", xlabel=f"active parameters, {name}", ylabel="loss, nats per token")
        _plot_optima(right, fit)
        right.set(xscale="log", yscale="log", xlabel="FLOPs", ylabel=f"N_opt, {name}")
        for axes in (left, right):
            axes.grid(alpha=0.3)
            axes.legend(fontsize="small")
    return figure


def _plot_losses(axes: Any, fit: IsoFlopFit, flops: Any, n: Any, losses: Any) -> None:
    for i, (group, parabola) in enumerate(zip(group_by_budget(flops), fit.parabolas, strict=True)):
        color = f"C{i}"
        axes.plot(n[group], losses[group], "o", color=color, label=f"C = {parabola.budget:.2g}")
        if parabola.coefficients is not None:
            x = np.linspace(np.log(n[group].min()), np.log(n[group].max()), 100)
            axes.plot(np.exp(x), np.polyval(parabola.coefficients, x), "-", color=color)
        if parabola.parameters is not None:
            axes.plot(parabola.parameters, parabola.loss, "*", color=color, ms=14, mec="black")


def _plot_optima(axes: Any, fit: ScalingFit) -> None:
    budgets = [p.budget for p in fit.isoflop.parabolas] + [p.budget for p in fit.predictions]
    c = np.geomspace(min(budgets), max(budgets), 50)
    used = [p for p in fit.isoflop.parabolas if p.parameters is not None]
    axes.plot([p.budget for p in used], [p.parameters for p in used], "k*", ms=12, label="minima")
    if (law := fit.isoflop.law) is not None:
        axes.plot(c, [law(x) for x in c], label=f"IsoFLOP, a = {law.exponent:.3f}")
    optima: Sequence[float] = [fit.parametric.optimum(x)[0] for x in c]
    axes.plot(c, optima, "--", label=f"parametric, a = {fit.parametric.exponent:.3f}")
