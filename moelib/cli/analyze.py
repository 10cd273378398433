"""`moelib analyze`: analyzes what runs wrote.

moelib analyze routing --trainer_dir=RUN                   # logs, numbers and plots of routing
moelib analyze scaling --budgets=1e20,1e21 runs/grid       # scaling laws of the runs below folders
moelib analyze twins runs/moe runs/dense                   # an MoE run and its dense twin

Each writes JSON, plots and report.md into a folder. `routing` first writes the routing logs of the
checkpoints that have none, then load, saturation, co-activation, specialization and drift over
steps, and a replay that predicts drops and all-to-all traffic.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

from moelib.cli.evaluate import find_steps
from moelib.core.config import did_you_mean
from moelib.core.errors import UsageError
from moelib.launch import DeviceFlags, import_module
from moelib.runs.folder import RunFolder
from moelib.runs.routing_file import RoutingLog, list_data
from moelib.runtime import storage
from moelib.runtime.command_line import check_used, flag
from moelib.runtime.progress import Progress
from moelib.runtime.table import print_table

# Analyses with flags of their own.
ROUTING, SCALING, LOSSES = ("routing",), ("scaling",), ("scaling", "twins")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(DeviceFlags):
    """Flags of the command."""

    output: str | None = flag(
        None, "Folder of the results; by default analysis/NAME, of routing in the run."
    )
    module: str | None = flag(None, "Module of the runs' own layers, which configs may name.")
    trainer_dir: str | None = flag(None, "folder of a run.", of=ROUTING)
    steps: str = flag("all", "steps of the logs: all, or steps such as 100,200.", of=ROUTING)
    evaler: str | None = flag(
        None, "evaler of the run whose input is logged; by default its only.", of=ROUTING
    )
    max_batches: int | None = flag(
        None,
        "number of batches of a log; by default that of the run's logs.",
        lower_bound=1,
        of=ROUTING,
    )
    mesh: str | None = flag(
        None, "mesh, such as fsdp=4,expert=2; by default one device.", of=ROUTING
    )
    module_dir: str | None = flag(
        None, "folder of the modules of the run's own layers.", of=ROUTING
    )
    skip_checksums: bool = flag(
        False, "whether to read a run without comparing checksums.", of=ROUTING
    )
    min_count: int = flag(
        100, "occurrences from which a token id has a share.", lower_bound=1, of=ROUTING
    )
    seed: int = flag(0, "seed of the permutation baseline.", of=ROUTING)
    capacity_factors: tuple[str, ...] = flag(
        (),
        "capacity factors whose drops are predicted; by default 1,1.25,1.5,2.",
        split=True,
        of=ROUTING,
    )
    expert_parallel: tuple[str, ...] = flag(
        (),
        "numbers of devices that share experts in the replay; by default 2,4,8.",
        split=True,
        of=ROUTING,
    )
    runs: tuple[str, ...] = flag((), "folder of runs, besides those that are arguments.", of=LOSSES)
    metric: str | None = flag(
        None,
        "loss; by default validation/cross_entropy if all have it, else mean_loss.",
        of=LOSSES,
    )
    budgets: tuple[str, ...] = flag(
        (), "FLOPs to predict the best model for, such as 1e20,1e21.", split=True, of=SCALING
    )
    num_bootstraps: int = flag(500, "refits for the intervals.", lower_bound=1, of=SCALING)


def run(flags: Flags, arguments: Sequence[str]) -> None:
    """Runs the analysis that the first argument names, on the runs that the others name."""
    if not arguments or arguments[0] not in ANALYSES:
        given = arguments[0] if arguments else ""
        raise UsageError(f"name an analysis, not {given!r}; {did_you_mean(given, ANALYSES)}")
    name, *folders = arguments
    check_used(flags, "the analysis", name)
    if flags.output is not None and os.path.isfile(flags.output):
        raise UsageError(f"--output={flags.output} is a file; name a folder.")
    if flags.module:
        import_module(flags.module)
    if files := ANALYSES[name](flags, folders):
        print(f"wrote {', '.join(files)}")


def routing(flags: Flags, folders: Sequence[str]) -> list[str]:
    """Writes missing routing logs, analyzes all, and returns the paths of the report.

    All processes write logs; process 0 writes the report.
    """
    if flags.trainer_dir is None or folders:
        raise UsageError("routing: set --trainer_dir to the folder of one run.")
    run, settings = flags.trainer_dir, _settings(flags)
    flags.set_up()
    import jax

    from moelib.analysis.routing import analyze, open_logs, write_analysis
    from moelib.runs.loading import as_mesh
    from moelib.train.checkpoint_routing import expected_steps, write_missing_logs

    wanted = None if flags.steps == "all" else _numbers("steps", flags.steps.split(","), int)
    as_mesh(flags.mesh)  # Raises if it is wrong, although no log may be missing.
    checkpoints = _checkpoints(run)
    if not checkpoints and not list_data(run):
        if not storage.is_remote(run) and not os.path.isdir(run):
            raise UsageError(f"--trainer_dir={run}: there is no such folder; name a run.")
        raise UsageError(
            f"--trainer_dir={run}: there is neither a checkpoint nor a routing log; name a run "
            "that has saved one."
        )
    selected = [step for step in checkpoints if wanted is None or step in wanted]
    with Progress("routing log of step", None) as progress:
        name, missing = write_missing_logs(
            run,
            selected,
            evaler=flags.evaler,
            max_batches=flags.max_batches,
            on_step=lambda step: progress.log(f"writing the routing log of step {step}"),
            mesh=flags.mesh,
            module_dir=flags.module_dir,
            skip_checksums=flags.skip_checksums,
        )
    if jax.process_index() != 0:
        return []
    expected = expected_steps(run, name, max(checkpoints, default=0)) if wanted is None else ()
    logs = open_logs(run, name, steps=wanted, expected=expected, missing=missing)
    _check_parallel(flags, logs.last)
    with Progress("layer", len(logs.last.layers)) as progress:
        found = analyze(logs, settings, on_layer=lambda layer: progress.update(text=layer))
    output = flags.output or os.path.join(run, "analysis", "routing")
    return write_analysis(logs, found, output, _decoder(run))


def _settings(flags: Flags) -> Any:
    from moelib.analysis.routing import Settings

    lists = {"capacity_factors": float, "expert_parallel": int}
    given = {name: kind for name, kind in lists.items() if getattr(flags, name)}
    numbers = {name: _numbers(name, getattr(flags, name), kind) for name, kind in given.items()}
    return Settings(min_count=flags.min_count, seed=flags.seed, **numbers)


def _check_parallel(flags: Flags, log: RoutingLog) -> None:
    """Raises UsageError if no layer can be replayed on a number of devices that was asked for."""
    batch, experts = log.header.batch_size, {log.sizes(x).num_experts for x in log.layers}
    for n in map(int, flags.expert_parallel):
        if batch % n or all(num % n for num in experts):
            sizes = ", ".join(map(str, sorted(experts)))
            raise UsageError(
                f"--expert_parallel={n}: set divisors of the {batch} sequences of a batch and of "
                f"the number of experts, {sizes}."
            )


def _numbers(
    name: str, texts: Sequence[str], kind: Callable[[str], Any], limit: float = 1e9
) -> list[Any]:
    """Returns the numbers of a flag, above 0 and below the limit, sorted. Raises UsageError."""
    try:
        values = [kind(text) for text in texts]
    except ValueError:
        values = []
    if not values or not all(0 < value < limit for value in values):
        raise UsageError(f"--{name}={','.join(texts)}: write positive numbers with commas.")
    return sorted(set(values))


def _checkpoints(run: str) -> list[int]:
    """Returns the steps of a run's checkpoints; none if it has only logs."""
    if not storage.exists(RunFolder(run).checkpoints):
        return []
    return find_steps(run, "all")


def _decoder(run: str) -> Callable[[int], str] | None:
    """Returns the function from a token id to its text, if the run has a tokenizer."""
    from moelib.data.tokens.tokenizer import FILE_NAME
    from moelib.huggingface.published_tokenizer import read_tokenizer

    if not storage.exists(os.path.join(run, FILE_NAME)):
        return None
    tokenizer = read_tokenizer(run)
    return lambda token: tokenizer.decode([token])


def scaling(flags: Flags, folders: Sequence[str]) -> list[str]:
    """Fits scaling laws to the runs below folders, and returns the paths of the report."""
    from moelib.analysis.scaling_laws import analyze
    from moelib.analysis.scaling_report import tables, write_report
    from moelib.analysis.training_runs import default_metric, read_curve
    from moelib.operations.runs import find_runs

    budgets = _numbers("budgets", flags.budgets, float, math.inf) if flags.budgets else []
    folders = _folders(flags, folders)
    found = (run for folder in folders for run in find_runs(folder))
    runs = list({os.path.realpath(run): run for run in found}.values())  # Each once.
    if not runs:
        raise UsageError(f"no run below {', '.join(folders) or 'no folder'}; name folders of runs.")
    metric = flags.metric or default_metric(runs)
    points = [read_curve(run, metric).run for run in runs]
    analysis = analyze(points, budgets, num_bootstraps=flags.num_bootstraps)
    for table in tables(analysis):
        print_table(table)
    return write_report(_output(flags, "scaling"), analysis, metric=metric)


def twins(flags: Flags, folders: Sequence[str]) -> list[str]:
    """Compares an MoE run with its dense twin, and returns the paths of the report."""
    from moelib.analysis.twins import compare_twins, twins_table, write_report

    found = compare_twins(_folders(flags, folders), flags.metric)
    print_table(twins_table(found))
    return write_report(_output(flags, "twins"), found)


def _folders(flags: Flags, folders: Sequence[str]) -> list[str]:
    found = [*flags.runs, *folders]
    for folder in found:
        storage.require_local("a folder of runs", folder, "copy the runs there")
    return found


def _output(flags: Flags, name: str) -> str:
    return flags.output or os.path.join("analysis", name)


ANALYSES = {"routing": routing, "scaling": scaling, "twins": twins}
