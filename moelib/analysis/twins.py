"""An MoE run compared with its dense twin, at equal FLOPs and at equal time."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from moelib.analysis.report import write_files
from moelib.analysis.training_runs import LossCurve, TrainingRun, default_metric, read_curve, select
from moelib.core.errors import UserError
from moelib.runtime.table import Table, to_markdown


@dataclasses.dataclass(frozen=True, kw_only=True)
class AtEqual:
    """The losses of both runs where the one that spent less of something ends."""

    cost: float  # FLOPs, or seconds of training steps.
    moe_loss: float  # Nats per token.
    dense_loss: float
    # Spending of the dense run until it had its loss here, over that of the MoE run until it had
    # the same loss: above 1 if MoE gains; None if the MoE run had it nowhere, or at its first line
    # a lower one.
    gain: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwinComparison:
    """An MoE run and its dense twin."""

    metric: str
    moe: TrainingRun
    dense: TrainingRun
    flops_per_token_ratio: float  # The dense run's FLOPs per token over the MoE run's.
    equal_flops: AtEqual
    equal_time: AtEqual | None  # None without step times.
    curves: tuple[LossCurve, LossCurve]  # Of MoE and dense, without losses that are not finite.
    notes: list[str]


def compare_twins(
    folders: Sequence[str],
    metric: str | None = None,
    *,
    step_seconds: Sequence[float] | None = None,
) -> TwinComparison:
    """Returns the comparison of an MoE run and its dense twin.

    Args:
        folders: Folders of both runs, in any order.
        metric: Loss to compare; None as in `default_metric`.
        step_seconds: Seconds per step of each run, measured elsewhere; None for those of the runs.

    Raises:
        UserError: If there are not two runs, one of them of a model with experts, on the same data
            and vocabulary, with finite losses, and one does not end before the first of the other.
    """
    if len(folders) != 2:
        raise UserError(f"{len(folders)} runs; name an MoE run and its dense twin.")
    metric = metric or default_metric(folders)
    curves = [read_curve(folder, metric) for folder in folders]
    for i, seconds in enumerate(step_seconds or ()):
        curves[i] = dataclasses.replace(curves[i], seconds=seconds * curves[i].steps)
    select([curve.run for curve in curves])  # Raises if they cannot be compared.
    is_moe = [curve.run.total_parameters > curve.run.parameters for curve in curves]
    if sum(is_moe) != 1:
        both = "both have" if all(is_moe) else "neither has"
        raise UserError(f"{' and '.join(folders)}: {both} experts; name an MoE and a dense run.")
    notes = []
    for i, curve in enumerate(curves):
        finite = np.isfinite(curve.losses)
        if not finite.all():
            steps = ", ".join(f"{step:.0f}" for step in curve.steps[~finite][:5])
            notes.append(f"{curve.run.name}: losses that are not finite, from step {steps}")
        if finite.sum() < 2:
            raise UserError(
                f"{curve.run.name}: {finite.sum()} finite values of {metric}; train on."
            )
        kept = {
            name: getattr(curve, name)[finite] for name in ("steps", "losses", "flops", "seconds")
        }
        curves[i] = dataclasses.replace(curve, **kept)
        if curve.run.steps < curve.run.max_step:
            notes.append(f"{curve.run.name}: at step {curve.run.steps} of {curve.run.max_step}")
    moe, dense = curves if is_moe[0] else curves[::-1]
    per_token = [x.run.flops / x.run.tokens for x in (moe, dense)]
    timed = all(x.seconds[-1] > 0 for x in curves)
    return TwinComparison(
        metric=metric,
        moe=moe.run,
        dense=dense.run,
        flops_per_token_ratio=per_token[1] / per_token[0],
        equal_flops=_at_equal("flops", moe, dense),
        equal_time=_at_equal("seconds", moe, dense) if timed else None,
        curves=(moe, dense),
        notes=notes,
    )


def _at_equal(name: str, moe: LossCurve, dense: LossCurve) -> AtEqual:
    """Returns the losses at equal FLOPs or seconds. Raises UserError if no losses are."""
    cost = min(getattr(x, name)[-1] for x in (moe, dense))
    for x in (moe, dense):
        if (first := getattr(x, name)[0]) > cost:
            raise UserError(
                f"{x.run.name}: its first loss is after {first:.3g} {name}, and the other run ends "
                f"at {cost:.3g}; name runs of equal length."
            )
    a, b = (float(np.interp(cost, getattr(x, name), x.losses)) for x in (moe, dense))
    reached = np.flatnonzero(moe.losses <= b)
    gain = None
    if len(reached) and moe.losses[0] >= b:  # The spending at which the loss first fell to b.
        lines = slice(max(reached[0] - 1, 0), reached[0] + 1)
        spent = np.interp(-b, -moe.losses[lines], getattr(moe, name)[lines])
        gain = float(cost / spent) if spent > 0 else None
    return AtEqual(cost=float(cost), moe_loss=a, dense_loss=b, gain=gain)


def twins_table(found: TwinComparison) -> Table:
    """Returns the losses of both runs at equal FLOPs and at equal time."""
    rows = []
    for name, unit, at in (
        ("equal FLOPs", "FLOPs", found.equal_flops),
        ("equal time", "s", found.equal_time),
    ):
        if at is not None:
            gain = "-" if at.gain is None else f"{at.gain:.2f}"
            losses = [f"{at.moe_loss:.4f}", f"{at.dense_loss:.4f}"]
            change = f"{at.moe_loss - at.dense_loss:+.4f}"
            rows.append([name, f"{at.cost:.4g} {unit}", *losses, change, gain])
    notes = [
        f"MoE: {found.moe.name}; dense: {found.dense.name}; loss: {found.metric}, nats per token.",
        "Gain: what the dense run spent on its loss, over what the MoE run spent on the same loss.",
        f"FLOPs per token, dense over MoE: {found.flops_per_token_ratio:.4f}.",
        *(f"{note}." for note in found.notes),
    ]
    columns = ["", "spent>", "MoE>", "dense>", "MoE - dense>", "gain>"]
    return Table("MoE and its dense twin", columns, rows, notes)


def write_report(folder: str, found: TwinComparison) -> list[str]:
    """Writes JSON, a plot and report.md into a folder, and returns their paths."""
    numbers: dict[str, Any] = dataclasses.asdict(found)
    for curve in numbers["curves"]:
        del curve["run"]
    numbers["curves"] = dict(zip(("moe", "dense"), numbers["curves"], strict=True))
    table, image = twins_table(found), "![Loss over FLOPs and time](twins.svg)"
    paragraphs = [f"# {table.title}", image, to_markdown(table)]
    return write_files(folder, {"twins": (numbers, plot(found))}, paragraphs)


def plot(found: TwinComparison) -> Any:
    """Returns a figure of the losses over FLOPs and over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = (("flops", "FLOPs"), ("seconds", "seconds of training steps"))
    for axes, (name, label) in zip(figure.subplots(1, 2), panels, strict=True):
        for curve, kind, style in zip(found.curves, ("MoE", "dense"), ("-", "--"), strict=True):
            axes.plot(getattr(curve, name), curve.losses, style, label=kind)
        axes.set(xlabel=label, ylabel="loss, nats per token", xscale="log", yscale="log")
        axes.grid(alpha=0.3, which="both")
        axes.legend()
    return figure
