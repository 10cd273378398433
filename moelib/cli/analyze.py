"""`moelib analyze`: analyzes what finished runs wrote.

moelib analyze scaling --budgets=1e20,1e21 runs/grid       # scaling laws of the runs below folders
moelib analyze twins runs/moe runs/dense                   # an MoE run and its dense twin

Each writes JSON, a plot and report.md into a folder, and prints the tables.
"""

import dataclasses
import os
from collections.abc import Callable, Sequence

from moelib.core import storage
from moelib.core.command_line import flag
from moelib.core.config import did_you_mean
from moelib.core.errors import UsageError
from moelib.core.table import print_table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    runs: tuple[str, ...] = flag((), "Folder of runs, besides those that are arguments.")
    output: str | None = flag(None, "Folder of the report; by default analysis/NAME.")
    metric: str | None = flag(
        None,
        "Loss to analyze; by default validation/cross_entropy if all runs have it, else mean_loss.",
    )
    module: str | None = flag(None, "Module of the runs' own layers, which configs may name.")
    budgets: tuple[str, ...] = flag(
        (), "scaling: FLOPs to predict the best model for, such as 1e20,1e21.", split=True
    )
    num_bootstraps: int = flag(500, "scaling: Refits for the intervals.", lower_bound=1)


def run(flags: Flags, arguments: Sequence[str]) -> None:
    """Runs the analysis that the first argument names on the runs that the others name."""
    if not arguments or arguments[0] not in ANALYSES:
        given = arguments[0] if arguments else ""
        raise UsageError(f"name an analysis, not {given!r}; {did_you_mean(given, ANALYSES)}")
    name, *folders = arguments
    if flags.budgets and name != "scaling":
        raise UsageError(f"--budgets={','.join(flags.budgets)} is of the analysis scaling.")
    if flags.module:
        from moelib.launch import import_module

        import_module(flags.module)
    folders = [*flags.runs, *folders]
    for folder in folders:
        storage.require_local("a folder of runs", folder, "copy the runs there")
    written = ANALYSES[name](flags, folders, flags.output or os.path.join("analysis", name))
    print(f"wrote {', '.join(written)}")


def scaling(flags: Flags, folders: Sequence[str], output: str) -> list[str]:
    """Fits scaling laws to the runs below folders, and returns the paths of the report."""
    from moelib.analysis.scaling_laws import analyze
    from moelib.analysis.scaling_report import tables, write_report
    from moelib.analysis.training_runs import default_metric, read_curve
    from moelib.operations.runs import find_runs

    budgets = [_number("--budgets", text) for text in flags.budgets]
    runs = [run for folder in folders for run in find_runs(folder)]
    if not runs:
        raise UsageError(f"no run below {', '.join(folders) or 'no folder'}; name folders of runs.")
    metric = flags.metric or default_metric(runs)
    points = [read_curve(run, metric).run for run in runs]
    analysis = analyze(points, budgets, num_bootstraps=flags.num_bootstraps)
    for table in tables(analysis):
        print_table(table)
    return write_report(output, analysis, metric=metric)


def twins(flags: Flags, folders: Sequence[str], output: str) -> list[str]:
    """Compares an MoE run with its dense twin, and returns the paths of the report."""
    from moelib.analysis.twins import compare_twins, twins_table, write_report

    found = compare_twins(folders, flags.metric)
    print_table(twins_table(found))
    return write_report(output, found)


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise UsageError(f"{name}={text}: set FLOPs above 0, such as 1e20.")
    return value


# By name: function of the flags, the folders of runs and the folder of the report.
ANALYSES: dict[str, Callable[[Flags, Sequence[str], str], list[str]]] = {
    "scaling": scaling,
    "twins": twins,
}
