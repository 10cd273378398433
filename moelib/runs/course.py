"""Rewinding a run to an earlier checkpoint, and the events of a run that decide its course."""

import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from moelib.checkpoint.checkpointer import Checkpointer
from moelib.checkpoint.contents import (
    CheckpointRecord,
    list_checkpoints,
    move_checkpoint,
    newest_record,
)
from moelib.checkpoint.restore import find_checkpoints, on_all_processes
from moelib.data.batches.skip_batches import SKIPPED, check_ranges, merged, parse_range
from moelib.runs.folder import RunFolder
from moelib.runs.identity import check_directory
from moelib.runs.input_state import input_state_of
from moelib.runtime import storage
from moelib.runtime.processes import agreed, on_process_0

logger = logging.getLogger(__name__)

REWIND_TO = "rewind_to"
INIT_FROM = "init_from"
_USED = (REWIND_TO, INIT_FROM, "changed", "bad_step", "silent_data_corruption_suspected")


def course_of(folder: RunFolder) -> list[dict[str, Any]]:
    """Returns the events that decide the course of a run, as process 0 sees them."""
    return on_process_0(lambda: [x for x in folder.events() if x["event"] in _USED])


def ranges_to_skip(
    cfg: Any, events: Iterable[Mapping[str, Any]], input_state: Mapping[str, Any] | None
) -> list[list[int]]:
    """Returns the ranges of the config, of bad steps and of the restored position, merged.

    If the config has some, those of the restored position end there: they replace later ones.
    """
    state = input_state or {}
    saved = state.get(SKIPPED, ())
    if cfg.skip_batches is not None and (end := state.get("step")) is not None:
        saved = [[first, min(stop, end)] for first, stop in saved if first < end]
    found = [[event["first"], event["stop"]] for event in events if "first" in event]
    found += map(parse_range, cfg.skip_batches or ())
    return merged([*found, *saved])


def requested(step: int | None, events: Iterable[Mapping[str, Any]]) -> bool:
    """Returns whether `rewind_to` is `step` for the first time.

    A command that is started again, as by a scheduler, does not rewind again. A start without
    `rewind_to` or with another step comes between two rewinds to the same step.
    """
    before = [event["step"] for event in events if event["event"] == REWIND_TO]
    return step != (before[-1] if before else None)


def rewind_or_resume(
    cfg: Any,
    folder: RunFolder,
    checkpointer: Checkpointer,
    rows: range,
    mesh_shape: Mapping[str, int],
    *,
    is_first: bool = True,
) -> int | None:
    """Checks that the checkpoint to resume from is this run's; returns its step, None without one.

    It is the newest, or that of `cfg.rewind_to`, the first time that it has this value; later ones
    are then moved aside. All processes must call it. `is_first` is False for a later phase of the
    same start, which a warning would call another start.

    Raises:
        CheckpointNotFoundError: If there is no checkpoint of the step to rewind to.
        TrainerDirConflictError: If it is not this run's.
        UserError: If its position in the data is past the batches to skip.
    """
    step, course = cfg.rewind_to, course_of(folder)
    is_new = requested(step, course)
    if step is not None and not is_new and is_first:
        logger.warning(
            "rewind_to=%d: the last start rewound the run already, and this one resumes it. To "
            "rewind it again, start it once without rewind_to.",
            step,
        )
    rewinds = step is not None and is_new
    if rewinds:
        find_checkpoints(checkpointer.dir, step)  # Else it would be compared with the first phase.

    def check() -> CheckpointRecord | None:
        if not rewinds and checkpointer.latest_step() is None:
            return None
        record = newest_record(checkpointer.dir, step if rewinds else None)
        check_directory(cfg, folder, record, mesh=mesh_shape)
        if rewinds and record is not None and record.input:
            state = input_state_of(record.input, rows) or {}
            check_ranges(ranges_to_skip(cfg, course, state), state)
        return record

    record, moved = agreed(check), None
    if rewinds:
        moved = set_aside(checkpointer.dir, step)
        if moved is not None:
            logger.warning("rewind_to=%d: later checkpoints are in %s now.", step, moved)
        if checkpointer.local is not None:
            checkpointer.local.delete_after(step)
    if is_new:
        on_process_0(lambda: folder.log(REWIND_TO, step=step, moved_to=moved))
    return None if record is None else record.step


def set_aside(folder: str, step: int) -> str | None:
    """Moves the checkpoints after `step` into a folder `rewound_<n>` below theirs; returns it.

    All processes must call it. The newest is moved first, so that a rewind that is interrupted can
    be repeated. Returns None if there are none, and on other processes than 0.

    Raises:
        CheckpointNotFoundError: If there is no checkpoint of `step`; names those that exist.
    """
    find_checkpoints(folder, step)

    def move() -> str | None:
        newer = [path for each, path in list_checkpoints(folder).items() if each > step]
        if jax.process_index() != 0 or not newer:
            return None
        used = storage.list_names(folder)
        name = next(x for n in range(1, len(used) + 2) if (x := f"rewound_{n}") not in used)
        aside = os.path.join(folder, name)
        storage.make_folder(aside)
        for path in reversed(newer):
            move_checkpoint(path, os.path.join(aside, os.path.basename(path)))
        return aside

    return on_all_processes(move, folder)
