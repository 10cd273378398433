"""The folder of a run: its config, the log of its events, its metrics, and its checkpoints.

The log has a line per start, change, failure and end. Lines are appended and never removed, unlike
metrics, which are dropped after the step from which a run resumes.
"""

import contextlib
import functools
import json
import logging
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from moelib.checkpoint.contents import CheckpointRecord, newest_record
from moelib.core.errors import UserError
from moelib.runtime import storage
from moelib.runtime.lock import LOCK_FILE, directory_lock
from moelib.runtime.storage import atomic_file, parse_json, read_json, read_text, write_json

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.txt"
EVENTS_FILE = "events.jsonl"
METRICS_FILE = "metrics.jsonl"
SAMPLE = "sample"  # Event of a generated text, with its step, its prompt and the text.
_RUN_FILE = "run.json"
_APPENDING = threading.Lock()  # An object is read and written again.

Event = dict[
    str, Any
]  # JSON values: the kind as `event`, `time` in seconds since 1970, and others.


class RunFolder:
    """The folder of a run; reads its events once, and knows those that it appends.

    Attributes:
        path: The folder itself, as a path or a URL.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Reads nothing yet."""
        self.path = os.fspath(path)
        self._events: list[Event] | None = None

    @property
    def own_checkpoints(self) -> str:
        """The folder of the checkpoints of a run whose `checkpointer.dir` is unset."""
        return self.file("checkpoints")

    @functools.cached_property
    def checkpoints(self) -> str:
        """The folder of the run's checkpoints, which run.json names if it is elsewhere."""
        try:
            elsewhere = read_json(self.file(_RUN_FILE)).get("checkpoints")
        except UserError as error:
            logger.warning("%s Checkpoints are read from %s.", error, self.own_checkpoints)
            elsewhere = None
        if not isinstance(elsewhere, str):
            return self.own_checkpoints
        return elsewhere if storage.is_remote(elsewhere) else self.file(elsewhere)

    def file(self, name: str) -> str:
        """Returns the path of a file in the folder."""
        return os.path.join(self.path, name)

    @property
    def config_file(self) -> str:
        """The path of the config's text."""
        return self.file(CONFIG_FILE)

    @property
    def metrics_file(self) -> str:
        """The path of the metrics, as JSON lines."""
        return self.file(METRICS_FILE)

    def record(self, step: int | None = None) -> CheckpointRecord | None:
        """Returns the record of the checkpoint of a step, by default the newest; None without."""
        return newest_record(self.checkpoints, step)

    # -- Events ----------------------------------------------------------------------------------

    def events(self) -> list[Event]:
        """Returns the events, oldest first; without lines that a crash left incomplete."""
        if self._events is None:
            path, found = self.file(EVENTS_FILE), []
            if storage.exists(path):
                with storage.open_to_read(path, encoding="utf-8", errors="replace") as file:
                    found = [x for line in file if (x := _event_of(line)) is not None]
            self._events = found  # Only now: after an error they are read again.
        return self._events

    def log(self, event: str, **fields: Any) -> None:
        """Appends an event of JSON values; only process 0 calls it."""
        line = {"time": round(time.time(), 3), "event": event, **fields}
        if not storage.is_remote(self.path):
            os.stat(self.path)  # A folder that was moved is not made again.
        with _APPENDING, storage.open_to_append(self.file(EVENTS_FILE)) as file:
            file.write(f"{json.dumps(line)}\n".encode())
        if self._events is not None:
            self._events.append(line)

    def note(self, event: str, **fields: Any) -> None:
        """Logs an event on process 0; a failure is logged, and training continues."""
        import jax

        if jax.process_index() != 0:
            return
        try:
            self.log(event, **fields)
        except (OSError, UserError) as error:
            logger.error("NO EVENT %r in the log of the run: %s. Training continues.", event, error)

    # -- Config ----------------------------------------------------------------------------------

    def config_text(
        self, record: CheckpointRecord | None = None, *, use_file: bool = False
    ) -> tuple[str, str]:
        """Returns the text of the config and its source, for errors; both empty without one.

        The text is that in the record of a checkpoint, which has a digest, so that a step is read
        with the config that trained it.

        Args:
            record: The record; None for config.txt.
            use_file: Whether config.txt is preferred to the record.

        Raises:
            UserError: If config.txt is needed, and cannot be read.
        """
        path, has_record = self.config_file, record is not None and bool(record.config)
        written = ""
        if (use_file or not has_record) and storage.exists(path):
            written = read_text(path)
        if record is not None and has_record and not written:
            return record.config, f"{self.path}, config in the record of step {record.step}, line "
        return (written, f"{path}:") if written else ("", "")

    def write_config(self, cfg: Any) -> None:
        """Writes config.txt, and run.json: folders of modules, and of checkpoints elsewhere.

        The config may name layers of the user's modules; Python's own folders are not listed.
        """
        storage.make_folder(self.path)
        with atomic_file(self.config_file) as file:
            file.write(cfg.debug_string())
        python = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
        dirs = dict.fromkeys(os.path.abspath(x) for x in sys.path if os.path.isdir(x or "."))
        own = [path for path in dirs if not path.startswith(python)]
        values: dict[str, Any] = {"module_dirs": own}
        checkpointer = dict(cfg.items()).get("checkpointer")
        folder = None if checkpointer is None else dict(checkpointer.items())["dir"]
        if isinstance(folder, str):  # Else it is unset.
            inside = os.path.join(storage.absolute(self.path), "")  # A run can be moved.
            values["checkpoints"] = storage.absolute(folder).removeprefix(inside)
        write_json(self.file(_RUN_FILE), values)

    def module_dirs(self) -> list[str]:
        """Returns the folders of modules in run.json; none without the file."""
        found = read_json(self.file(_RUN_FILE)).get("module_dirs")
        return [str(each) for each in found] if isinstance(found, list) else []

    # -- Locks -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def locked(self, checkpoints: str | None = None) -> Iterator[list[Callable[[], None]]]:
        """Locks the folder and, if they are elsewhere, that of the checkpoints, for the body.

        Yields functions that raise UserError if a folder was moved, or its lock removed; none of
        them is left after the body. A UserError of the body leaves nothing in a folder that had
        nothing before.

        Raises:
            DirectoryInUseError: If another process has locked one.
            UserError: If files cannot be created in one.
        """
        folders = {"dir (--trainer_dir)": self.path}
        if checkpoints is not None:
            parent = os.path.dirname(checkpoints)
            if os.path.realpath(self.path) not in map(os.path.realpath, (checkpoints, parent)):
                mark = CONFIG_FILE if storage.is_remote(parent) else LOCK_FILE
                of_a_run = storage.exists(os.path.join(parent, mark))  # Which locks only that.
                folders["checkpointer.dir"] = parent if of_a_run else checkpoints
        checks: list[Callable[[], None]] = []
        with contextlib.ExitStack() as stack:
            stack.callback(checks.clear)
            for setting, folder in folders.items():
                is_new = not storage.is_remote(folder) and not os.path.exists(folder)
                checks.append(stack.enter_context(directory_lock(folder, setting=setting)))
                stack.push(functools.partial(_clear_refused, folder, is_new))
            yield checks


def _clear_refused(folder: str, is_new: bool, kind: type | None, *_: object) -> None:
    """Removes the lock and the events of a run that a UserError ended before it wrote a config."""
    if kind is None or not issubclass(kind, UserError):
        return
    with contextlib.suppress(OSError):
        names = storage.list_names(folder)
        if all(name == EVENTS_FILE or name.startswith(LOCK_FILE) for name in names):
            for name in (EVENTS_FILE, LOCK_FILE):
                storage.remove(os.path.join(folder, name))
            if is_new:
                os.rmdir(folder)


def _event_of(line: str) -> Event | None:
    try:
        event = parse_json(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event and "time" in event else None


def origin_text(origin: Mapping[str, Any]) -> str:
    """Returns the run, and its step, or the model of Hugging Face that another run starts from."""
    step = origin.get("step")
    return str(origin["run"]) + ("" if step is None else f", step {step}")
