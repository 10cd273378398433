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


def run(flags: Flags, arguments: Sequence[str]) -> None:
    """Trains all runs, and shows them. Exits with status 1 if one has failed."""
    no_arguments(arguments, Flags)
    if not flags.trainer_dir:
        raise UsageError("--trainer_dir is required: the folder that the runs write to.")
    storage.require_local("the folder of a sweep", flags.trainer_dir, "copy the runs afterwards")
    runs = [
        dataclasses.replace(flags, set=sets, trainer_dir=os.path.join(flags.trainer_dir, name))
        for name, sets in trials(flags.set).items()
    ]
    for each in runs:  # Errors of all runs are found before the first one trains.
        launch.check_data_dir(each.load())
    failed = []
    for i, each in enumerate(runs):
        print(f"Run {i + 1} of {len(runs)}: {each.trainer_dir}", file=sys.stderr, flush=True)
        if subprocess.call([sys.executable, "-m", "moelib", "train", *train_arguments(each)]):
            failed.append(str(each.trainer_dir))
    _show(flags.trainer_dir, [str(each.trainer_dir) for each in runs])
    if failed:
        print(f"Failed: {', '.join(failed)}; the same command tries them again.", file=sys.stderr)
        sys.exit(1)


def trials(sets: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Returns the assignments of each run, by the name of its folder.

    Raises:
        UsageError: If no assignment has several values, or two have the same name.
    """
    choices = [[(path, value) for value in _values(path, text)] for path, text in map(_split, sets)]
    varied = [path for path, *_ in (found[0] for found in choices if len(found) > 1)]
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

    begun = [each for each in runs if each in find_runs(each)]
    if not begun:
        return
    found = list_runs(begun)
    loss = lambda run: next((last for last, *_ in run.validation.values()), None) or run.loss
    found.sort(key=lambda run: (loss(run) is None, loss(run)))
    named = [dataclasses.replace(run, name=os.path.relpath(run.name, folder)) for run in found]
    print_table(runs_table(named))
    trained = [run.name for run in found if run.loss is not None]
    if trained:
        picture = os.path.join(folder, PICTURE)
        plot_runs(picture, trained, ["mean_loss"])
        print(f"wrote {picture}")
