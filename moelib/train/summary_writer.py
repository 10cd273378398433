"""Summaries: numbers by step, as JSON lines and as TensorBoard event files."""

import contextlib
import json
import logging
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax

from moelib.core.config import REQUIRED, Required, config_class
from moelib.core.module import Module, nowrap

logger = logging.getLogger(__name__)


class SummaryWriter(Module):
    """Writes scalars; on process 0 alone.

    `<dir>/<group>/` holds TensorBoard's files, `<jsonl_path>` one JSON object a line and step.
    """

    @config_class
    class Config(Module.Config):
        dir: Required[str] = REQUIRED  # A trainer sets <its dir>/summaries.
        jsonl_path: Required[str] = REQUIRED  # A trainer sets <its dir>/metrics.jsonl.
        formats: Sequence[Literal["tensorboard", "json_lines"]] = ("tensorboard", "json_lines")

    def __init__(self, cfg: Any, *, parent: Module | None) -> None:
        super().__init__(cfg, parent=parent)
        self._active = jax.process_index() == 0
        self._events: dict[str, Any] = {}
        self._jsonl: Any = None
        self._purge_step: int | None = None
        self._failures = 0

    @nowrap
    def resume(self, step: int) -> None:
        """Drops what was written after `step`, so that a resumed run goes on where it restored.

        If the disk does not allow it, that is logged as an error, and the later lines stay.
        """
        if not self._active:
            return
        self._purge_step = step + 1
        if "json_lines" not in self.config.formats:
            return
        path = self.config.jsonl_path
        try:
            truncate_json_lines(path, step)
        except OSError as error:
            logger.error(
                "METRICS after step %d stay in %s: %s. Training goes on.", step, path, error
            )

    @nowrap
    def write(self, step: int, scalars: Mapping[str, float], *, group: str = "train") -> None:
        """Writes scalars of a step; they are on disk when this returns.

        That the disk is full is logged as an error, and no more.

        Args:
            step: The step.
            scalars: By name; in JSON, what is not finite becomes null.
            group: "train" or the name of an evaler, which in JSON is put before the names.
        """
        if not self._active:
            return
        try:
            if "json_lines" in self.config.formats:
                self._write_json(step, scalars, group)
            if "tensorboard" in self.config.formats:
                self._write_events(step, scalars, group)
        except OSError as error:
            self._failures += 1
            if self._failures == 1:
                logger.error("NO METRICS of step %d: %s. Training goes on.", step, error)
            return
        if self._failures:
            logger.error("Metrics are written again; %d writes failed before.", self._failures)
            self._failures = 0

    def _write_json(self, step: int, scalars: Mapping[str, float], group: str) -> None:
        prefix = "" if group == "train" else f"{group}/"
        values = {f"{prefix}{name}": _json_number(x) for name, x in scalars.items()}
        line = json.dumps({"step": step, "time": round(time.time(), 3), **values})
        self._json_lines().write(line + "\n")

    def _json_lines(self) -> Any:
        if self._jsonl is None:
            path = self.config.jsonl_path
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
            self._jsonl = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        return self._jsonl

    def _write_events(self, step: int, scalars: Mapping[str, float], group: str) -> None:
        from tensorboard.compat.proto import summary_pb2

        if group not in self._events:
            self._events[group] = _EventFile(os.path.join(self.config.dir, group))
            if self._purge_step is not None:
                self._events[group].purge(self._purge_step)
        values = [summary_pb2.Summary.Value(tag=tag, simple_value=x) for tag, x in scalars.items()]
        self._events[group].add(step=step, summary=summary_pb2.Summary(value=values))

    @nowrap
    def close(self) -> None:
        """Closes the files. The writer can be used again.

        What the disk does not take is lost, which is logged as an error, and no more.
        """
        files = [*self._events.values(), *([] if self._jsonl is None else [self._jsonl])]
        self._events.clear()
        self._jsonl = None
        for file in files:
            try:
                file.close()
            except OSError as error:
                logger.error("THE LAST METRICS may not be on disk: %s.", error)


class _EventFile:
    """One TensorBoard file, by the package's RecordWriter: EventFileWriter loads TensorFlow."""

    def __init__(self, directory: str) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        os.makedirs(directory, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        path = os.path.join(directory, name)
        self._file = open(path, "xb")  # noqa: SIM115
        self._records = RecordWriter(self._file)
        try:
            self.add(file_version="brain.Event:2")
        except OSError:
            with contextlib.suppress(OSError):
                self._file.close()
            os.remove(path)
            raise

    def add(self, **fields: Any) -> None:
        """Writes an event with these fields."""
        from tensorboard.compat.proto import event_pb2

        event = event_pb2.Event(wall_time=time.time(), **fields)
        self._records.write(event.SerializeToString())
        self._records.flush()

    def purge(self, step: int) -> None:
        """Tells TensorBoard to forget what older files hold from `step` on."""
        from tensorboard.compat.proto import event_pb2

        self.add(step=step, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def close(self) -> None:
        try:
            self._records.close()
        finally:
            self._file.close()


def _json_number(x: float) -> float | None:
    return x if math.isfinite(x) else None


def truncate_json_lines(path: str, step: int) -> int:
    """Drops the lines of a file of JSON lines that are past `step`, or torn; returns how many."""
    if not os.path.exists(path):
        return 0
    kept, dropped = [], 0
    with open(path, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.endswith("\n") and _step_of(line) <= step:
                kept.append(line)
            else:
                dropped += 1
    if dropped:
        try:
            with open(f"{path}.tmp", "w", encoding="utf-8") as out:
                out.writelines(kept)
            os.replace(f"{path}.tmp", path)
        except OSError:
            with contextlib.suppress(OSError):
                os.remove(f"{path}.tmp")  # Half of it would take room for nothing.
            raise
    return dropped


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
