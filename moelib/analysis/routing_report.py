"""Plots and the report of routing analyses."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from moelib.runtime.table import Table, to_markdown

_MOST_LINES = 10  # Layers that have a line of their own color and name in a legend.
_MOST_MAPS = 4  # Layers whose co-activation is shown.

# Title of each analysis, the label of its plot, and its text in the report.
PLOTS = {
    "load": (
        "Load",
        "max load / mean load - 1",
        (
            "The violation of an even load (MaxVio) is 0 for an even load, and E - 1 if one expert "
            "of E gets all assignments. Entropy: that of the router's probabilities, nats."
        ),
    ),
    "saturation": (
        "Saturation",
        "share of the top-K experts",
        "The share of a token's k best experts that are among its k best at the last step.",
    ),
    "coactivation": (
        "Co-activation",
        "P(j | i)",
        (
            "The share of the tokens of expert i (row) that also go to expert j (column). Rows of "
            "experts without a token are blank."
        ),
    ),
    "specialization": (
        "Specialization",
        "share of the token id's occurrences",
        (
            "The largest share of a token id's occurrences that goes to an expert, as a mean over "
            "experts. The baseline permutes assignments among tokens: only the difference to it is "
            "specialization."
        ),
    ),
    "drift": (
        "Drift",
        "share of assignments that changed",
        "The shares of assignments and of load that changed since the step before the last.",
    ),
    "replay": (
        "Replay",
        "rows sent per token",
        (
            "The log predicts the assignments that a capacity drops, and the rows that tokens send "
            "to other devices of the all-to-all in a forward pass, each way."
        ),
    ),
}


def _floats(values: Sequence[float | None]) -> np.ndarray:
    return np.array([math.nan if value is None else value for value in values], float)


# -- Plots ---------------------------------------------------------------------------------------


def plot(analysis: str, steps: Sequence[int], layers: Mapping[str, Any]) -> Any:
    """Returns the figure of an analysis.

    Args:
        analysis: Name in `PLOTS`.
        steps: All steps; undefined numbers are gaps.
        layers: Numbers of the analysis by layer.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    if analysis == "coactivation":
        _heat_maps(figure, layers)
    elif analysis in ("specialization", "replay"):
        _bars(figure.subplots(), analysis, layers)
    else:
        lines = {"load": "max_violation", "drift": "changed"}
        names = {n: lines.get(analysis) or list(x)[-1] for n, x in layers.items()}
        _lines(figure.subplots(), steps, {n: layers[n][names[n]] for n in layers})
        figure.axes[0].set(xlabel="step", ylabel=PLOTS[analysis][1])
    return figure


def _lines(axes: Any, steps: Sequence[int], values: Mapping[str, Sequence[float | None]]) -> None:
    for i, (name, series) in enumerate(values.items()):
        color = axes._get_lines.get_next_color() if len(values) <= _MOST_LINES else None
        shade = color or (0.1, 0.3 + 0.6 * i / len(values), 0.7)
        axes.plot(steps, _floats(series), marker="o", ms=3, label=name, color=shade)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small", ncols=1 + len(values) // _MOST_LINES)


def _heat_maps(figure: Any, layers: Mapping[str, Any]) -> None:
    """Draws layers (rows) at steps (columns) in one scale; diagonals, which are 1, are blank."""
    names = list(layers)
    chosen = sorted({round(i * (len(names) - 1) / (_MOST_MAPS - 1)) for i in range(_MOST_MAPS)})
    steps = list(next(iter(layers.values())))
    figure.set_size_inches(2.6 * len(steps) + 1, 2.6 * len(chosen))
    grid = figure.subplots(len(chosen), len(steps), squeeze=False)
    maps = [[np.array([_floats(r) for r in layers[names[i]][s]]) for s in steps] for i in chosen]
    for each in (each for row in maps for each in row):
        np.fill_diagonal(each, math.nan)
    defined = [each[~np.isnan(each)] for row in maps for each in row]
    most = max((float(x.max()) for x in defined if len(x)), default=1.0)
    for row, i, images in zip(grid, chosen, maps, strict=True):
        for axes, step, image in zip(row, steps, images, strict=True):
            axes.imshow(image, vmin=0, vmax=most, cmap="viridis")
            axes.set_title(f"{names[i]}, step {step}", fontsize="x-small")
    figure.colorbar(grid[0, 0].images[0], ax=grid, label=PLOTS["coactivation"][1])


def _bars(axes: Any, analysis: str, layers: Mapping[str, Any]) -> None:
    """Draws the numbers of the report's table that have the unit of the plot."""
    rows = [_cells(analysis, numbers, (0, 0), None) for numbers in layers.values()]
    bars = [column for column in rows[0] if re.fullmatch("share|baseline|rows, .*", column)]
    where, width = np.arange(len(layers)), 0.8 / max(len(bars), 1)
    for i, column in enumerate(bars):
        heights = _floats([row[column] for row in rows])
        axes.bar(where + (i - (len(bars) - 1) / 2) * width, heights, width, label=column)
    axes.set_xticks(where, list(layers), rotation=30, ha="right", fontsize="x-small")
    axes.set_ylabel(PLOTS[analysis][1])
    if bars:
        axes.legend(fontsize="x-small")


# -- Report --------------------------------------------------------------------------------------


def report(logs: Any, found: Mapping[str, Any], decode: Callable[[int], str] | None) -> list[str]:
    """Returns the paragraphs of the report: what the logs are of, and each analysis.

    Args:
        logs: The `Logs`.
        found: The numbers, by analysis and layer.
        decode: Function from a token id to its text; None shows ids only.
    """
    header, first = logs.last.header, min(logs.logs)
    batches = "1 batch" if header.num_batches == 1 else f"{header.num_batches} batches"
    rare = next(iter(found["specialization"].values()))
    notes = [f"step {step}: {reason}" for step, reason in logs.missing.items()]
    notes += _dead_experts(logs.steps, found["load"])
    notes.append(
        f"{rare['token_ids_too_rare']} token ids occur less than {rare['min_count']} times, and "
        f"{rare['token_ids_that_never_occur']} never: they have no share."
    )
    summary = (
        f"{len(logs.logs)} steps, {first} to {header.step}, of {batches} of "
        f"{header.batch_size} x {header.seq_len} tokens of {logs.data!r}. Numbers are of step "
        f"{header.step} where no step is named. Config: {header.config_hash}."
    )
    paragraphs = [
        f"# Routing of {logs.run}",
        summary,
        "Missing or not defined, null in the numbers and gaps in the plots:",
        "\n".join(f"- {note}" for note in notes),
    ]
    ends = logs.steps.index(first), logs.steps.index(header.step)
    for analysis, layers in found.items():
        title, _, text = PLOTS[analysis]
        paragraphs += [f"## {title}", text, f"![{title}]({analysis}.svg)"]
        cells = {name: _cells(analysis, x, ends, decode) for name, x in layers.items()}
        if columns := list(next(iter(cells.values()))):
            rows = [[name, *map(_text, each.values())] for name, each in cells.items()]
            paragraphs.append(to_markdown(Table("", ["layer", *(f"{x}>" for x in columns)], rows)))
    return paragraphs


def _dead_experts(steps: Sequence[int], layers: Mapping[str, Any]) -> list[str]:
    """Returns a line for each layer and step with experts without a token."""
    return [
        f"{layer}, step {step}: no token goes to the experts {', '.join(map(str, dead))}."
        for layer, numbers in layers.items()
        for step, dead in zip(steps, numbers["dead_experts"], strict=True)
        if dead
    ]


def _cells(
    analysis: str, numbers: Any, ends: tuple[int, int], decode: Callable[[int], str] | None
) -> dict[str, Any]:
    """Returns a layer's line of the table of an analysis, by column; empty without a table.

    `ends` are the positions of the first and the last step with a log.
    """
    first, last = ends
    match analysis:
        case "load":
            return {
                "max / mean - 1": numbers["max_violation"][last],
                "entropy": numbers["entropy"][last],
                "experts without a token": len(numbers["dead_experts"][last]),
            }
        case "saturation":
            return {f"k = {k}, first step": x[first] for k, x in numbers.items()}
        case "specialization":
            best = max(numbers["experts"], key=lambda each: each["share"] or 0.0)
            shown = [f"{(decode or str)(x['token'])!r} {x['share']:.2f}" for x in best["best"]]
            return {
                "share": numbers["mean_share"],
                "baseline": numbers["mean_chance"],
                "best token ids": f"expert {best['expert']}: {', '.join(shown)}" if shown else "",
            }
        case "drift":
            return {"assignments": numbers["changed"][last], "load": numbers["load_shift"][last]}
        case "replay":
            cells = {f"dropped at {factor}": x for factor, x in numbers["drops"].items()}
            for n, x in numbers["expert_parallel"].items():
                cells[f"rows, {n} devices"] = x["rows_per_token"]
            return cells
    return {}


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else f"{value:.4g}"
