"""The log of a run: a line per start, change, failure and end in `events.jsonl`.

Lines are appended and never removed, unlike metrics, which are dropped after the step from which
a run resumes.
"""

import json
import logging
import os
import threading
import time
from typing import Any

import jax

from moelib.core.errors import UserError
from moelib.runtime import storage
from moelib.runtime.files import parse_json

logger = logging.getLogger(__name__)

EVENTS_FILE = "events.jsonl"
CONFIG_FILE = "config.txt"  # Next to it: the config of the run.
_APPENDING = threading.Lock()  # An object is read and written again.


def log_event(directory: str, event: str, **fields: Any) -> None:
    """Appends an event to the log of the run in a folder; only process 0 calls it.

    Args:
        directory: Folder of the run.
        event: Kind of event, such as "start".
        fields: JSON values.
    """
    line = json.dumps({"time": round(time.time(), 3), "event": event, **fields})
    if not storage.is_remote(directory):
        os.stat(directory)  # A folder that was moved is not made again.
    with _APPENDING, storage.open_to_append(os.path.join(directory, EVENTS_FILE)) as file:
        file.write(f"{line}\n".encode())


def note_event(directory: str, event: str, **fields: Any) -> None:
    """Logs an event on process 0; a failure is logged, and training continues."""
    if jax.process_index() != 0:
        return
    try:
        log_event(directory, event, **fields)
    except (OSError, UserError) as error:
        logger.error("NO EVENT %r in the log of the run: %s. Training continues.", event, error)


def read_events(directory: str) -> list[dict[str, Any]]:
    """Returns the events of a run, oldest first; without lines that a crash left incomplete."""
    path = os.path.join(directory, EVENTS_FILE)
    if not storage.exists(path):
        return []
    with storage.open_to_read(path, encoding="utf-8", errors="replace") as file:
        return [event for line in file if (event := _event_of(line)) is not None]


def _event_of(line: str) -> dict[str, Any] | None:
    try:
        event = parse_json(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event and "time" in event else None
