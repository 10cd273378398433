"""`moelib runs`: lists, compares, plots or serves the runs below folders.

moelib runs                                  # runs below runs/
moelib runs FOLDER ...                       # runs at or below folders
moelib runs --compare RUN RUN ...            # configs, and losses at the same steps
moelib runs --plot=loss.svg --metrics=loss,validation/loss RUN ...
moelib runs --serve=8080 FOLDER              # a status page, for this machine only

The files of a run are read, and never changed; a run may train at the same time.
"""

import contextlib
import dataclasses
import json
import os
import threading
from collections.abc import Sequence

from moelib.core.errors import UsageError
from moelib.runtime import storage
from moelib.runtime.command_line import check_file, flag
from moelib.runtime.table import print_table

_ENDINGS = (".pdf", ".png", ".svg")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    compare: bool = flag(False, "Show how the configs and the metrics of two or more runs differ.")
    plot: str | None = flag(None, "Picture of the metrics of runs to write: .pdf, .png or .svg.")
    metrics: tuple[str, ...] = flag(
        (), "Metrics to compare or plot (docs/metrics.md); by default mean_loss.", split=True
    )
    json: bool = flag(False, "Print JSON instead of tables.")
    serve: int | None = flag(
        None, "Port of a page that shows the runs until Ctrl+C; 0 for any free one.", lower_bound=0
    )
    serve_host: str | None = flag(
        None, "Address to serve on instead of 127.0.0.1; others can then read the runs."
    )


def run(flags: Flags, arguments: Sequence[str]) -> None:
    """Lists the runs below folders, or does what a flag asks for."""
    if flags.serve_host is not None and flags.serve is None:
        raise UsageError(f"--serve_host={flags.serve_host} requires --serve.")
    if flags.metrics and not flags.compare and flags.plot is None:
        raise UsageError(f"--metrics={','.join(flags.metrics)} requires --compare or --plot.")
    if flags.json and flags.plot is not None and not flags.compare:
        raise UsageError("--json: --plot prints nothing; set --compare too, or remove one.")
    folders = list(arguments) or ["runs"]
    if flags.serve is not None:
        _serve(flags, folders)
    elif flags.compare or flags.plot is not None:
        _compare(flags, list(arguments))
    else:
        from moelib.operations.runs import list_runs, runs_table

        runs = list_runs(folders)
        if flags.json:
            print(json.dumps([dataclasses.asdict(each) for each in runs], indent=2))
        else:
            print_table(runs_table(runs))


def _compare(flags: Flags, runs: list[str]) -> None:
    from moelib.operations.compare import (
        comparison_tables,
        config_differences,
        metrics_at_same_steps,
        plot_runs,
    )
    from moelib.operations.runs import find_runs

    for folder in runs:
        storage.require_local("a folder of runs", folder, "copy the run there")
        if folder not in find_runs(folder):
            raise UsageError(f"{folder} is no run; name folders with a config.txt.")
    if len(runs) < (2 if flags.compare else 1):
        text = "--compare requires two runs" if flags.compare else "--plot requires a run"
        raise UsageError(f"{text}: name their folders.")
    names = flags.metrics or ("mean_loss",)
    if flags.plot is not None:
        if os.path.splitext(flags.plot)[1] not in _ENDINGS:
            raise UsageError(f"--plot={flags.plot}: end the name in {', '.join(_ENDINGS)}.")
        check_file("plot", flags.plot)
        plot_runs(flags.plot, runs, names)
        print(f"wrote {flags.plot}")
    if not flags.compare:
        return
    configs, metrics = config_differences(runs), metrics_at_same_steps(runs, names)
    if flags.json:
        print(json.dumps({"runs": runs, "config": configs, "metrics": metrics}, indent=2))
    else:
        for table in comparison_tables(runs, configs, metrics):
            print_table(table)


def _serve(flags: Flags, folders: list[str]) -> None:
    from moelib.operations.status_page import status_page

    if len(folders) != 1:
        raise UsageError(f"--serve={flags.serve}: name one folder, not {len(folders)}.")
    storage.require_local("a folder of runs", folders[0], "copy the runs there")
    if not os.path.isdir(folders[0]):
        raise UsageError(f"{folders[0]}: there is no such folder.")
    with status_page(folders[0], flags.serve or 0, flags.serve_host) as url:
        print(f"{url} shows the runs below {folders[0]}; Ctrl+C ends it.", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
