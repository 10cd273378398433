"""Lines of code of the examples of tasks, next to RedCoast's: `python -m benchmarks.task_lines`.

Blank lines, comments and docstrings are not counted. `--plot=docs/images/task_lines.svg` also draws
the table.
"""

import ast
import dataclasses
import io
import pathlib
import sys
import tokenize
from collections.abc import Sequence

from moelib.runtime.command_line import flag, no_arguments, run_command
from moelib.runtime.figures import save_figure
from moelib.runtime.table import Table, print_table

_TASKS = pathlib.Path(__file__).parents[1] / "experiments" / "tasks"

# Paradigm: (our files, lines of code of RedCoast's folder), at its commit 8129ab3.
PARADIGMS = {
    "image classification": (["image_classification", "command"], 80),  # And the others' flags.
    "text classification": (["text_classification"], 168),
    "sequence-to-sequence": (["sequence_to_sequence"], 184),
    "language model": (["causal_lm"], 214),
    "captioning": (["captioning"], 192),
    "diffusion": (["diffusion"], 261),
    "DP-SGD": (["differential_privacy"], 165),
    "MAML": (["maml"], 165),
    "FedAvg": (["federated_averaging"], 249),
    "PPO and DDPG": (["ppo", "ddpg"], 458),
}

SHARED = (
    "Code that examples share counts once. Captioning takes its decoder and training from",
    "sequence-to-sequence; captioning, diffusion, DP-SGD and FedAvg read the digits of image",
    "classification, and all take their flags from its row.",
)

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    plot: str | None = flag(None, "Path of a picture of the table, whose ending gives the format.")


def code_lines(source: str) -> int:
    """Returns the number of lines of a Python file with code."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    spans = [(t.start[0], t.end[0]) for t in tokens if t.type not in _NO_CODE]
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        if ast.get_docstring(node) is not None:
            text = node.body[0]
            spans = [s for s in spans if not text.lineno <= s[0] <= (text.end_lineno or 0)]
    return len({line for first, last in spans for line in range(first, last + 1)})


def count() -> list[tuple[str, int, int]]:
    """Returns (paradigm, our lines, lines of RedCoast) of the examples that exist."""
    lines = {path.stem: code_lines(path.read_text("utf-8")) for path in _TASKS.glob("*.py")}
    return [
        (name, sum(lines[file] for file in files), theirs)
        for name, (files, theirs) in PARADIGMS.items()
        if all(file in lines for file in files)
    ]


def plot(rows: Sequence[tuple[str, int, int]], image: str) -> None:
    """Writes a picture with two bars per paradigm."""
    from matplotlib.figure import Figure

    names, ours, theirs = zip(*reversed(rows), strict=True)
    figure = Figure(figsize=(6, 0.4 * len(rows) + 1), layout="constrained")
    axes = figure.subplots()
    places = [float(i) for i in range(len(rows))]
    axes.barh([y + 0.2 for y in places], ours, 0.4, label="moelib")
    axes.barh([y - 0.2 for y in places], theirs, 0.4, label="RedCoast")
    axes.set_yticks(places, names)
    axes.set(xlabel="lines of code")
    axes.grid(axis="x", alpha=0.3)
    axes.legend()
    save_figure(figure, image)


def run(flags: Flags, arguments: Sequence[str]) -> None:
    """Prints the table."""
    no_arguments(arguments, Flags)
    rows = count()
    cells = [(name, str(ours), str(theirs)) for name, ours, theirs in rows]
    total = ("total", str(sum(r[1] for r in rows)), str(sum(r[2] for r in rows)))
    columns = ("example", "moelib>", "RedCoast>")
    print_table(Table("Lines of code", columns, [*cells, (), total], SHARED))
    if flags.plot is not None:
        plot(rows, flags.plot)


if __name__ == "__main__":
    sys.exit(run_command("benchmarks.task_lines", Flags, run, sys.argv[1:], __doc__ or ""))
