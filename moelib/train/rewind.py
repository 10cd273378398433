"""Rewinding a run to an earlier checkpoint, and the events of a run that decide its course."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from moelib.checkpoint.contents import list_checkpoints
from moelib.checkpoint.object_store import move_checkpoint
from moelib.checkpoint.restore import find_checkpoints, on_all_processes
from moelib.core import storage
from moelib.core.processes import gather_json
from moelib.data.skip_batches import SKIPPED, merged, parse_range
from moelib.train.run_log import read_events

REWIND_TO = "rewind_to"
_USED = (REWIND_TO, "changed", "bad_step", "silent_data_corruption_suspected")


def course_of(directory: str) -> list[dict[str, Any]]:
    """Returns the events that decide the course of a run, as process 0 sees them."""
    events = read_events(directory) if jax.process_index() == 0 else []
    return gather_json([event for event in events if event["event"] in _USED])[0]


def ranges_to_skip(
    cfg: Any, events: Iterable[Mapping[str, Any]], input_state: Mapping[str, Any] | None
) -> list[list[int]]:
    """Returns the ranges of the config, of bad steps and of the restored position, merged."""
    found = [[event["first"], event["stop"]] for event in events if "first" in event]
    found += map(parse_range, cfg.skip_batches or ())
    return merged([*found, *(input_state or {}).get(SKIPPED, ())])


def requested(step: int | None, events: Iterable[Mapping[str, Any]]) -> bool:
    """Returns whether `rewind_to` is `step` for the first time.

    A command that is started again, as by a scheduler, does not rewind again. A start without
    `rewind_to` or with another step comes between two rewinds to the same step.
    """
    before = [event["step"] for event in events if event["event"] == REWIND_TO]
    return step != (before[-1] if before else None)


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
