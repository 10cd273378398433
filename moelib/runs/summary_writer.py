"""Metrics by step, written as JSON lines and as TensorBoard event files."""

import contextlib
import functools
import json
import logging
import math
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jax

from moelib.core.config import REQUIRED, Required, config_class
from moelib.core.errors import UserError
from moelib.core.metrics import Scalars
from moelib.core.module import Module
from moelib.runs.folder import RunFolder
from moelib.runs.tracker import Tracker, TrackerThread
from moelib.runtime import storage
from moelib.runtime.storage import atomic_file, parse_json, readable

logger = logging.getLogger(__name__)

# TensorBoard shows tags by the part before the first "/", in alphabetical order: "loss" is first.
# {part: first parts of the names of metrics}; metrics of layers and of the model are in "model".
_TAG_GROUPS = {
    "loss": "loss mean_loss cross_entropy perplexity bits_per_byte objective aux_loss",
    "optimizer": "learning_rate gradient_norm parameter_norm update_norm update_ratio "
    "gradient_noise skipped skipped_steps",
    "speed": "tokens_per_second examples_per_second step_seconds tflops_per_second mfu "
    "device_memory_gb",
    "time": "time goodput productive_seconds time_lost checkpoint",
    "tokens": "num_tokens bytes_per_token",
}
_GROUP_OF = {name: group for group, names in _TAG_GROUPS.items() for name in names.split()}


def tensorboard_tag(name: str) -> str:
    """Returns the tag of a metric: its name after the group that TensorBoard shows it in."""
    first = name.partition("/")[0]
    group = _GROUP_OF.get(first, "model")
    return name if name.startswith(f"{group}/") else f"{group}/{name}"


class SummaryWriter(Module):
    """Writes metrics; on process 0 only.

    Files on an object store are uploaded once a minute, by `upload` and by `close`.

    `<dir>/<group>/` holds TensorBoard's files, `<jsonl_path>` one JSON object per line and step.
    """

    @config_class
    class Config(Module.Config):
        dir: Required[str] = REQUIRED  # Folder of event files; a trainer sets <its dir>/summaries.
        jsonl_path: Required[str] = REQUIRED  # A trainer sets <its dir>/metrics.jsonl.
        # Formats of the metrics on disk.
        formats: Sequence[Literal["tensorboard", "json_lines"]] = ("tensorboard", "json_lines")
        trackers: dict[str, Tracker.Config] = {}  # Services that show the metrics, by name.

    def __init__(self, cfg: Any, *, parent: Module | None) -> None:
        super().__init__(cfg, parent=parent)
        self._events: dict[str, _EventFile] = {}
        self._json_lines: Any = None
        self._trackers = {name: tracker.instantiate() for name, tracker in cfg.trackers.items()}
        self._threads: list[TrackerThread] = []
        self._purge_step: int | None = None
        self._num_failures = 0

    @functools.cached_property
    def _formats(self) -> Sequence[str]:
        """Formats that this process writes. Initializes JAX's devices, unlike building a writer."""
        return self.config.formats if jax.process_index() == 0 else ()

    def resume(self, step: int) -> None:
        """Drops everything written after `step`, so that a resumed run continues from there.

        If that fails, an error is logged, and the later lines stay.
        """
        self._purge_step = step + 1
        path = self.config.jsonl_path
        try:
            if "json_lines" in self._formats:
                truncate_json_lines(path, step)
        except (OSError, UserError) as error:
            logger.error("METRICS after step %d stay in %s: %s.", step, path, error)

    def write(self, step: int, scalars: Mapping[str, float], *, group: str = "train") -> None:
        """Writes the metrics of a step; they are in the files when this returns.

        A full disk is logged as an error, and training continues.

        Args:
            step: The step.
            scalars: Metrics by name; values that are not finite become null in JSON.
            group: "train" or the name of an evaler, which precedes the names in JSON.
        """
        prefix = "" if group == "train" else f"{group}/"
        named = {f"{prefix}{name}": x for name, x in scalars.items()}
        for thread in self._threads:
            thread.write(step, named)
        with self._failures_logged(step):
            if "json_lines" in self._formats:
                values = {name: x if math.isfinite(x) else None for name, x in named.items()}
                line = {"step": step, "time": round(time.time(), 3), **values}
                file = self._open_json_lines()
                file.write(f"{json.dumps(line)}\n".encode())
                file.flush()
            if "tensorboard" in self._formats:
                tags = {tensorboard_tag(name): value for name, value in scalars.items()}
                self._event_file(group).add_scalars(step, tags)

    def start_trackers(self, config_text: str) -> None:
        """Starts or continues the run in all trackers; only process 0 calls it.

        They get each write from then on.

        Raises:
            UserError: If a package or a setting of a tracker is missing.
        """
        folder = RunFolder(os.path.dirname(storage.absolute(self.config.jsonl_path)))
        for name, tracker in self._trackers.items():
            self._threads.append(TrackerThread(name, tracker, config_text, folder))

    def write_text(self, step: int, title: str, text: str) -> None:
        """Writes text for TensorBoard's text tab, shown as it is, without Markdown."""
        if "tensorboard" in self._formats:
            with self._failures_logged(step):
                self._event_file("train").add_text(step, title, text)

    @contextlib.contextmanager
    def _failures_logged(self, step: int) -> Iterator[None]:
        """Logs the first error of the disk, and the end of a series of them."""
        try:
            yield
        except OSError as error:
            self._num_failures += 1
            if self._num_failures == 1:
                logger.error("NO METRICS of step %d: %s. Training continues.", step, error)
            return
        if self._num_failures:
            logger.error("Metrics are written again, after %d failures.", self._num_failures)
            self._num_failures = 0

    def _open_json_lines(self) -> Any:
        if self._json_lines is None:
            self._json_lines = storage.open_to_append(self.config.jsonl_path)
        return self._json_lines

    def _event_file(self, group: str) -> "_EventFile":
        if group not in self._events:
            self._events[group] = _EventFile(os.path.join(self.config.dir, group))
            if self._purge_step is not None:
                self._events[group].purge(self._purge_step)
        return self._events[group]

    def upload(self) -> None:
        """Starts to upload what was written, such as before a checkpoint; returns at once."""
        with self._failures_logged(self._purge_step or 0):
            for file in (self._json_lines, *(each._file for each in self._events.values())):
                if isinstance(file, storage.GrowingObject):
                    file.flush_soon()

    def close_trackers(self, stopped_by: str | None = None) -> None:
        """Ends the run in all trackers; `stopped_by` names the signal that stopped it."""
        stopped = stopped_by is not None and stopped_by.startswith("SIG")
        while self._threads:
            status = "failed" if sys.exception() else "stopped" if stopped else "finished"
            self._threads.pop().close(status)

    def close(self) -> None:
        """Closes the files; a later write opens them again. Errors of the disk are logged."""
        files = [*self._events.values(), self._json_lines]
        self._events.clear()
        self._json_lines = None
        for file in filter(None, files):
            try:
                file.close()
            except OSError as error:
                logger.error("THE LAST METRICS may not be on disk: %s.", error)


class _EventFile:
    """One TensorBoard file, by the package's RecordWriter: EventFileWriter loads TensorFlow."""

    def __init__(self, directory: str) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        storage.make_folder(directory)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        path = os.path.join(directory, name)
        self._file = storage.open_to_append(path)
        self._records = RecordWriter(self._file)
        try:
            self._add(file_version="brain.Event:2")
        except OSError:
            with contextlib.suppress(OSError):
                self._file.close()
            storage.remove(path)
            raise

    def _add(self, **fields: Any) -> None:
        """Writes an event with these fields."""
        from tensorboard.compat.proto import event_pb2

        event = event_pb2.Event(wall_time=time.time(), **fields)
        self._records.write(event.SerializeToString())
        self._records.flush()

    def add_scalars(self, step: int, scalars: Scalars) -> None:
        """Writes scalars by tag."""
        from tensorboard.compat.proto import summary_pb2

        values = [summary_pb2.Summary.Value(tag=tag, simple_value=x) for tag, x in scalars.items()]
        self._add(step=step, summary=summary_pb2.Summary(value=values))

    def add_text(self, step: int, tag: str, text: str) -> None:
        """Writes text, as a code block of Markdown."""
        from tensorboard.plugins.text.summary_v2 import text_pb

        block = "".join(f"    {line}\n" for line in text.splitlines())
        self._add(step=step, summary=text_pb(tag, block))

    def purge(self, step: int) -> None:
        """Makes TensorBoard ignore events of older files from `step` on."""
        from tensorboard.compat.proto import event_pb2

        self._add(step=step, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def close(self) -> None:
        try:
            self._records.close()
        finally:
            self._file.close()


def truncate_json_lines(path: str, step: int) -> None:
    """Drops the incomplete lines of a file of JSON lines and those after `step`.

    Dropping all of them, at step 0, is a warning: checkpoints may have been lost. Others that are
    not in the order of their steps are one too.
    """
    if not storage.exists(path):
        return
    with readable(path), storage.open_to_read(path, encoding="utf-8", errors="replace") as file:
        lines = list(file)
    kept = [line for line in lines if line.endswith("\n") and _step_of(line) <= step]
    if step == 0 and len(kept) < len(lines):
        logger.warning(
            "%s has metrics up to step %.0f, but there is no checkpoint: they are deleted, as the "
            "run starts from step 0.",
            path,
            max((_step_of(x) for x in lines if _step_of(x) < math.inf), default=0.0),
        )
    steps = [_step_of(line) for line in kept]
    if steps != sorted(steps) or not all(x.is_integer() for x in steps):
        logger.warning("%s: the steps of its lines are not ascending integers.", path)
    if len(kept) < len(lines):
        with atomic_file(path) as file:
            file.writelines(kept)


def _step_of(line: str) -> float:
    try:
        return float(parse_json(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
