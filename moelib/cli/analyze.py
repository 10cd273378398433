"""`moelib analyze`: numbers, plots and a report of what runs wrote.

    moelib analyze routing --trainer_dir=RUN
    moelib analyze routing --trainer_dir=RUN --steps=100,200 --evaler=validation --max_batches=8

`routing` writes the routing logs of the checkpoints that have none, then load, saturation,
co-activation, specialization and drift over steps, and a replay that predicts drops and all-to-all
traffic, into analysis/routing in the run.
"""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

from moelib.cli.evaluate import find_steps
from moelib.core import storage
from moelib.core.command_line import flag
from moelib.core.config import did_you_mean
from moelib.core.errors import UsageError
from moelib.core.progress import Progress
from moelib.launch import DeviceFlags, import_module


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(DeviceFlags):
    """Flags of the command."""

    trainer_dir: str | None = flag(None, "Folder of a run.")
    steps: str = flag("all", "Steps of the logs: all, or steps such as 100,200.")
    evaler: str | None = flag(None, "Evaler of the run whose input is logged; by default its only.")
    max_batches: int | None = flag(
        None, "Number of batches of a log; by default that of the run's logs.", lower_bound=1
    )
    mesh: str | None = flag(None, "Mesh, such as fsdp=4,expert=2; by default one device.")
    module: str | None = flag(None, "Module of the run's own layers, which its config may name.")
    module_dir: str | None = flag(None, "Folder of the modules of the run's own layers.")
    skip_checksums: bool = flag(False, "Whether to read a run without comparing checksums.")
    min_count: int = flag(100, "Occurrences from which a token id has a share.", lower_bound=1)
    seed: int = flag(0, "Seed of the permutation baseline.")
    capacity_factors: tuple[str, ...] = flag(
        (), "Capacity factors whose drops are predicted; by default 1,1.25,1.5,2.", split=True
    )
    expert_parallel: tuple[str, ...] = flag(
        (), "Numbers of devices that share experts in the replay; by default 2,4,8.", split=True
    )
    output: str | None = flag(None, "Folder of the results; by default analysis/ in the run.")


def run(flags: Flags, arguments: Sequence[str]) -> None:
    """Runs the analysis that the first argument names."""
    if len(arguments) != 1 or arguments[0] not in _ANALYSES:
        names = ", ".join(_ANALYSES)
        if not arguments:
            raise UsageError(f"name an analysis: {names}.")
        if arguments[0] in _ANALYSES:
            raise UsageError(f"unexpected argument {arguments[1]!r}; name one of {names}.")
        advice = did_you_mean(arguments[0], _ANALYSES)
        raise UsageError(f"unknown analysis {arguments[0]!r}; {advice}")
    _ANALYSES[arguments[0]](flags)


def _routing(flags: Flags) -> None:
    """Writes missing routing logs, and analyzes all."""
    if flags.trainer_dir is None:
        raise UsageError("set --trainer_dir to the folder of a run.")
    run, settings = flags.trainer_dir, _settings(flags)
    flags.set_up()
    from moelib.analysis.routing import analyze, open_logs, write_analysis
    from moelib.train.checkpoint_routing import expected_steps, write_missing_logs

    if flags.module:
        import_module(flags.module)
    wanted = None if flags.steps == "all" else _numbers("steps", flags.steps.split(","), int)
    checkpoints = _checkpoints(run)
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
    expected = expected_steps(run, name, max(checkpoints, default=0)) if wanted is None else ()
    logs = open_logs(run, name, steps=wanted, expected=expected, missing=missing)
    with Progress("layer", len(logs.last.layers)) as progress:
        found = analyze(logs, settings, on_layer=lambda layer: progress.update(text=layer))
    output = flags.output or os.path.join(run, "analysis", "routing")
    files = write_analysis(logs, found, output, _decoder(run))
    print(f"wrote {', '.join(files)} in {output}")


def _settings(flags: Flags) -> Any:
    from moelib.analysis.routing import Settings

    lists = {"capacity_factors": float, "expert_parallel": int}
    given = {name: kind for name, kind in lists.items() if getattr(flags, name)}
    numbers = {name: _numbers(name, getattr(flags, name), kind) for name, kind in given.items()}
    return Settings(min_count=flags.min_count, seed=flags.seed, **numbers)


def _numbers(name: str, texts: Sequence[str], kind: Callable[[str], Any]) -> list[Any]:
    """Returns the positive numbers of a flag. Raises UsageError."""
    try:
        values = [kind(text) for text in texts]
    except ValueError:
        values = []
    if not values or not all(0 < value < 1e9 for value in values):
        raise UsageError(f"--{name}={','.join(texts)}: write positive numbers with commas.")
    return sorted(set(values))


def _checkpoints(run: str) -> list[int]:
    """Returns the steps of a run's checkpoints; none if it has only logs."""
    if not storage.exists(os.path.join(run, "checkpoints")):
        return []
    return find_steps(run, "all")


def _decoder(run: str) -> Callable[[int], str] | None:
    """Returns the function from a token id to its text, if the run has a tokenizer."""
    from moelib.data.tokenizer import FILE_NAME, read_tokenizer

    if not storage.exists(os.path.join(run, FILE_NAME)):
        return None
    tokenizer = read_tokenizer(run)
    return lambda token: tokenizer.decode([token])


_ANALYSES: dict[str, Callable[[Flags], None]] = {"routing": _routing}
