"""Drills: a run in several processes that is disturbed, and compared with an undisturbed one."""

import contextlib
import dataclasses
import json
import os
import pathlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from moelib.core.errors import UserError
from moelib.operations import faults
from moelib.operations.faults import Fault
from moelib.runs.folder import RunFolder
from moelib.runs.metrics_file import read_metrics
from moelib.runtime.files import write_json
from moelib.runtime.table import Table
from moelib.train.watchers.bad_steps import SUSPECTED, BadSteps
from moelib.train.watchers.device_check import DeviceCheck

_KILLS_PER_RUN = 4

# Runs the processes of a folder to their end, and returns their exit status.
Launch = Callable[[str], int]


class Scenario(NamedTuple):
    """Faults of one run, and what the run promises after them."""

    name: str
    faults: Sequence[Fault]
    max_lost: int  # Steps that may be taken twice.
    by_hand: bool = False  # Whether the run ends with an error, and is started again by hand.
    setup: Callable[[Any], Any] = lambda cfg: cfg  # Changes the run's config.
    event: str | None = None  # Event that the log of the run must have.


class Outcome(NamedTuple):
    """A disturbed run, compared with the undisturbed one."""

    scenario: Scenario
    status: int  # Exit status of the last start.
    num_starts: int
    lost: int  # Steps taken twice.
    recovery_seconds: float | None  # From the last fault to the next step that ended.
    is_equal: bool  # Whether all losses are equal to the last bit.

    @property
    def is_kept(self) -> bool:
        """Whether the run kept its promise."""
        return self.is_equal and not self.status and self.lost <= self.scenario.max_lost


def scenarios(interval: int, num_processes: int) -> list[Scenario]:
    """Returns the scenarios of a drill.

    A process that dies while a checkpoint is written loses that checkpoint, too: up to two
    intervals less a step. A damaged checkpoint costs one more interval.

    Args:
        interval: Steps between checkpoints; a run has four intervals.
        num_processes: Number of processes.
    """
    last, step = num_processes - 1, 2 * interval + interval // 2 + 1

    def at_step(kind: str, process: int | None = last) -> Fault:
        return Fault(kind, faults.STEP, step, process)

    killed, once = at_step("kill"), 2 * interval - 1
    in_save, in_restore = faults.SAVE, Fault("kill", faults.RESTORE, 0, last)
    of_file = lambda kind: [at_step("kill_when_saved"), Fault(kind, faults.START, 0, 0)]
    data = lambda kind: [Fault(kind, faults.BATCH, step, last)]
    not_a_number = [at_step("not_a_number", None)]
    return [
        Scenario("a process is killed in a step", [killed], once),
        Scenario("the coordinator is killed", [at_step("kill", 0)], once),
        Scenario("killed, local checkpoints", [killed], 2, setup=_save_locally),
        Scenario("killed in a save", [Fault("kill", in_save, 2 * interval, last)], once),
        Scenario("killed in a step, then in the restore", [killed, in_restore], once),
        Scenario("SIGTERM", [at_step("terminate")], 0),
        Scenario("a process hangs", [at_step("hang")], once),
        Scenario(
            "killed, and a bit of the checkpoint flips",
            of_file("flip_bit_of_file"),
            once + interval,
        ),
        Scenario("killed, and the checkpoint is cut short", of_file("cut_file"), once + interval),
        Scenario("the disk is full in a save", [Fault("full_disk", in_save, 2 * interval)], 0),
        Scenario(f"data come {faults.SLOW_SECONDS:.0f} s late", data("slow"), 0),
        Scenario("data cannot be read for a moment", data("fail_once"), 0),
        Scenario("data cannot be read", data("fail"), once, by_hand=True),
        Scenario("parameters become NaN", not_a_number, once, by_hand=True),
        Scenario(
            "parameters become NaN, BadSteps",
            not_a_number,
            once,
            setup=_take_again,
            event=SUSPECTED,
        ),
        Scenario(
            "a bit flips in one replica, DeviceCheck",
            [at_step("replica_bit")],
            once,
            by_hand=True,
            setup=_check_devices,
            event="device_difference",
        ),
    ]


def _save_locally(cfg: Any) -> None:
    cfg.checkpointer.set(local_dir=os.path.join(cfg.dir, "local"), local_every_n_steps=1)


def _take_again(cfg: Any) -> None:
    cfg.watchers = {"bad_steps": BadSteps.default_config()}


def _check_devices(cfg: Any) -> None:
    check = DeviceCheck.default_config().set(every_n_steps=1, dim=64)
    cfg.watchers = {"device_check": check}


def random_kills(number: int, interval: int, num_processes: int, seed: int = 0) -> list[Scenario]:
    """Returns scenarios of up to four kills each, of random processes in random steps."""
    chosen, found = random.Random(seed), []
    for first in range(0, number, _KILLS_PER_RUN):
        steps = chosen.sample(range(2, 4 * interval + 1), min(_KILLS_PER_RUN, number - first))
        kills = [
            Fault("kill", faults.STEP, step, chosen.randrange(num_processes))
            for step in sorted(steps)
        ]
        killed = ", ".join(f"{kill.process} in step {kill.step}" for kill in kills)
        found.append(Scenario(f"killed: {killed}", kills, len(kills) * (2 * interval - 1)))
    return found


def run_drill(
    cfg: Any, folder: str, chosen: Sequence[Scenario], launch: Launch
) -> Iterator[Outcome]:
    """Yields the outcome of each scenario, after the undisturbed run.

    Args:
        cfg: Config of a trainer, small enough to be run many times.
        folder: Folder for a run per scenario.
        chosen: The scenarios.
        launch: Starts the processes of a run's folder, and starts them again when one is lost.

    Raises:
        UserError: If the undisturbed run fails.
    """
    undisturbed = _run(cfg, os.path.join(folder, "undisturbed"), Scenario("", [], 0), launch)
    if undisturbed.status:
        raise UserError(
            f"The undisturbed run ended with status {undisturbed.status}; see "
            f"{folder}/undisturbed/job/process_0.log."
        )
    expected = losses(os.path.join(folder, "undisturbed"))
    for i, each in enumerate(chosen):
        path = os.path.join(folder, f"{i + 1:02}")
        outcome = _run(cfg, path, each, launch)
        yield outcome._replace(is_equal=losses(path) == expected)


def _run(cfg: Any, folder: str, scenario: Scenario, launch: Launch) -> Outcome:
    os.makedirs(folder)
    small = cfg.clone(dir=folder)
    scenario.setup(small)
    path = pathlib.Path(folder)
    pathlib.Path(RunFolder(folder).config_file).write_text(small.debug_string(), encoding="utf-8")
    write_json(path / "faults.json", [dataclasses.asdict(fault) for fault in scenario.faults])
    status = launch(folder)
    if status and scenario.by_hand:
        status = launch(folder)
    logged = {event["event"] for event in RunFolder(folder).events()}
    if scenario.event and scenario.event not in logged:
        status = status or 1  # The run ended for another reason.
    events = _events(path / "drill.jsonl")
    starts = [event["start"] for event in events if "start" in event]
    steps = [event["step"] for event in events if "step" in event and "fault" not in event]
    hit = [event["time"] for event in events if "fault" in event]
    later = [e for e in events if hit and e["time"] > hit[-1]]
    restart = next((i for i, event in enumerate(later) if "start" in event), 0)
    after = [e["time"] for e in later[restart:] if "step" in e and "fault" not in e]
    return Outcome(
        scenario,
        status,
        len(starts),
        lost=len(steps) - len(set(steps)),
        recovery_seconds=after[0] - hit[-1] if after else None,
        is_equal=False,
    )


def _events(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the events in a file, without lines that a kill cut short; none without the file."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def _verdict(outcome: Outcome) -> str:
    if not outcome.is_kept:
        return "BROKEN"
    return "kept, by hand" if outcome.scenario.by_hand else "kept"


def losses(folder: str) -> dict[int, float]:
    """Returns the loss of each step of a run."""
    return {line["step"]: line["loss"] for line in read_metrics(folder, ["loss"]) if "loss" in line}


def drill_table(outcomes: Sequence[Outcome], interval: int) -> Table:
    """Returns the outcomes as a table."""
    rows = [
        [
            each.scenario.name,
            str(each.num_starts),
            str(each.lost),
            str(each.scenario.max_lost),
            "-" if each.recovery_seconds is None else f"{each.recovery_seconds:.1f}",
            "yes" if each.is_equal else "no",
            _verdict(each),
        ]
        for each in outcomes
    ]
    columns = "fault", "starts>", "lost steps>", "promised>", "recovery s>", "equal losses"
    note = f"A checkpoint every {interval} steps. Equal: to the last bit, in every step."
    return Table("Drill", [*columns, "promise"], rows, [note])
