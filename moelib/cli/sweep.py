"""`moelib sweep`: trains a config once for each combination of values, and compares the runs.

moelib sweep -m M -c C --trainer_dir=runs/lr --set=learner.clip_norm=0.5,1,2 --set=prng_seed=0,1

Values of --set that are separated by commas are tried one by one; one in brackets, or a mesh, is a
single value. Each run is a `moelib train` in a folder of its own below --trainer_dir: the same
command goes on where it ended. At the end there are a table and a picture, sweep.svg.
"""

import dataclasses
import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from moelib import launch
from moelib.cli.launch import train_arguments
from moelib.core.errors import UsageError
from moelib.runtime import storage
from moelib.runtime.command_line import no_arguments
from moelib.runtime.table import print_table

Flags = launch.TrainFlags

PICTURE = "sweep.svg"
_OF_A_JOB = ("num_processes", "process_id", "distributed_coordinator")
_STOPPED = 75  # Status of a `moelib train` that SIGTERM ended.


def run(flags: Flags, arguments: Sequence[str]) -> None:
    """Trains all runs, and shows them. Exits with status 1 if one has failed."""
    no_arguments(arguments, Flags)
    if not flags.trainer_dir:
        raise UsageError("--trainer_dir is required: the folder that the runs write to.")
    for name in _OF_A_JOB:
        if getattr(flags, name) is not None:
            raise UsageError(f"--{name}: a sweep trains in one process at a time; leave it unset.")
    storage.require_local("--trainer_dir", flags.trainer_dir, "copy the runs afterwards")
    runs = [_flags_of(flags, name, sets) for name, sets in trials(flags.set).items()]
    _check(runs)
    failed = []
    for i, each in enumerate(runs):
        print(f"Run {i + 1} of {len(runs)}: {each.trainer_dir}", file=sys.stderr, flush=True)
        status, is_stopped = _train([*train_arguments(each), f"--stopped_status={_STOPPED}"])
        if is_stopped or status == _STOPPED:
            print("Stopped; the same command goes on.", file=sys.stderr)
            sys.exit(flags.stopped_status)
        if status:
            failed.append(str(each.trainer_dir))
    _show(flags.trainer_dir, [str(each.trainer_dir) for each in runs])
    if failed:
        print(f"Failed: {', '.join(failed)}; the same command tries them again.", file=sys.stderr)
        sys.exit(1)


def _flags_of(flags: Flags, name: str, sets: tuple[str, ...]) -> Flags:
    """Returns the flags of a run, with a folder of its own."""
    dump = None if flags.dump is None else os.path.join(flags.dump, name)
    path = os.path.join(flags.trainer_dir or "", name)
    return dataclasses.replace(flags, set=sets, trainer_dir=path, dump=dump)


def _check(runs: Sequence[Flags]) -> None:
    """Finds the errors of all configs before the first one trains, and those that are equal."""
    names: dict[str, str | None] = {}
    for each in runs:
        cfg = each.load()
        launch.check_data_dir(cfg)
        cfg.instantiate(parent=None)
        text = cfg.clone(dir="").debug_string()
        if text in names:
            raise UsageError(
                f"--set: {names[text]} and {each.trainer_dir} have the same config; another flag "
                "sets the field, or two values are equal."
            )
        names[text] = each.trainer_dir


def _train(arguments: Sequence[str]) -> tuple[int, bool]:
    """Returns the exit status of a `moelib train`, and whether a signal asked this process to end.

    The run saves a checkpoint then. Ctrl+C reaches it by itself.
    """
    process = subprocess.Popen([sys.executable, "-m", "moelib", "train", *arguments])
    asked: list[int] = []

    def on_signal(number: int, frame: object) -> None:
        del frame
        asked.append(number)
        if number == signal.SIGTERM:
            process.terminate()

    before = {each: signal.signal(each, on_signal) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        return process.wait(), bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def trials(sets: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Returns the assignments of each run, by the name of its folder.

    Raises:
        UsageError: If no assignment has several values, or two have the same name.
    """
    choices = [[(path, value) for value in _values(path, text)] for path, text in map(_split, sets)]
    paths = [each[0][0] for each in choices]
    varied = [path for path, each in zip(paths, choices, strict=True) if len(each) > 1]
    for path, value in itertools.chain.from_iterable(choices):
        if not value:
            raise UsageError(f"--set={path}=: a value is empty; write it, or remove the comma.")
    for path in varied:
        if paths.count(path) > 1:
            raise UsageError(f"--set={path}=...: it is set twice; give all its values at once.")
    if not varied:
        raise UsageError("--set: no field has several values; separate them by commas.")
    names = {path: _short(path, varied) for path in varied}
    found: dict[str, tuple[str, ...]] = {}
    for combination in itertools.product(*choices):
        parts = [f"{names[path]}={value}" for path, value in combination if path in names]
        name = re.sub(r"[^\w.,=+-]+", "_", ",".join(parts))
        if name in found:
            raise UsageError(
                f"--set: two runs are {name}; give each field once, with other values."
            )
        found[name] = tuple(f"{path}={value}" for path, value in combination)
    return found


def _split(assignment: str) -> tuple[str, str]:
    path, _, text = assignment.partition("=")
    return path.strip(), text


def _values(path: str, text: str) -> list[str]:
    """Returns the values that commas outside of brackets and quotes separate."""
    if path == "mesh_shape":
        return [text]
    found, depth, quote = [""], 0, ""
    for character in text:
        if quote or character in "'\"":
            quote = "" if character == quote else quote or character
        else:
            depth += (character in "([{") - (character in ")]}")
            if character == "," and not depth:
                found.append("")
                continue
        found[-1] += character
    return [value.strip() for value in found]


def _short(path: str, others: Sequence[str]) -> str:
    """Returns the last part of a path, or as many as distinguish it from the others."""
    parts = path.split(".")
    for i in range(len(parts) - 1, 0, -1):
        tail = ".".join(parts[i:])
        if sum(f".{each}".endswith(f".{tail}") for each in others) == 1:
            return tail
    return path


def _show(folder: str, runs: Sequence[str]) -> None:
    """Prints a table of the runs, the lowest loss first, and writes their curves."""
    from moelib.operations.compare import plot_runs
    from moelib.operations.runs import find_runs, list_runs, runs_table

    begun = [each for each in runs if os.path.isdir(each) and each in find_runs(each)]
    if not begun:
        return
    found = list_runs(begun)
    loss = lambda run: next((last for last, *_ in run.validation.values()), run.loss)
    found.sort(key=lambda run: (loss(run) is None, loss(run)))
    named = [dataclasses.replace(run, name=os.path.relpath(run.name, folder)) for run in found]
    print_table(runs_table(named))
    trained = [run.name for run in found if run.loss is not None]
    if trained:
        picture = os.path.join(folder, PICTURE)
        plot_runs(picture, trained, ["mean_loss"])
        print(f"wrote {picture}")
