"""The runs below a folder: their state, their metrics, and how they differ."""

import contextlib
import dataclasses
import logging
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moelib.checkpoint.contents import RECORD_FILE, list_checkpoints, list_lost
from moelib.core.errors import UserError
from moelib.runs.curves import RunMetrics
from moelib.runs.folder import CONFIG_FILE, EVENTS_FILE, METRICS_FILE, RunFolder, origin_text
from moelib.runs.metrics_file import MetricsReader
from moelib.runtime import storage
from moelib.runtime.lock import is_locked
from moelib.runtime.table import Table

logger = logging.getLogger(__name__)

VALIDATION = r"[^/]+/loss"  # Losses of evaluations.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A run, as its files tell."""

    name: str  # Path of its folder.
    state: str  # "running", "finished", "stopped" or "failed".
    cause: str  # Signal or error that ended it; empty if there is none.
    step: int  # Step of its last metrics.
    max_step: int | None  # None without a config.txt.
    phase: str  # Name of the phase that it was in last; empty before the first, and without.
    loss: float | None  # Mean loss of the last log interval, nats per token.
    # {"<evaler>/loss": (last value, least value, its step)}; None for values that are not finite.
    validation: Mapping[str, tuple[float | None, float | None, int]]
    rate: float | None  # Tokens or examples per second, on all devices.
    rate_unit: str  # "tokens/s", or "examples/s" of a task, DPO or GSPO.
    goodput: float | None  # 0 to 1.
    changed: float  # Time of the last change of its files, in seconds since 1970.
    origin: str  # Run and step whose state it began with; empty for a run of its own.
    damage: str  # Lines of its metrics that cannot be read.


def find_runs(folder: str) -> Iterator[str]:
    """Yields the folders of the runs at or below a folder, in the order of their names.

    A folder with checkpoints that has neither config.txt nor metrics is named in a warning.
    """
    fail = lambda error: logger.warning("%s: %s.", error.filename, error.strerror)
    for path, folders, files in os.walk(folder, onerror=fail):
        own = [x for x in (CONFIG_FILE, METRICS_FILE, EVENTS_FILE) if x in files]
        if odd := [x for x in own if not os.path.isfile(os.path.join(path, x))]:
            logger.warning("%s: no run, as its %s is no regular file.", path, odd[0])
            folders.clear()
        elif CONFIG_FILE in files or METRICS_FILE in files:
            yield path
            folders.clear()
        elif os.path.basename(RunFolder(path).own_checkpoints) in folders:
            text = "%s: no run, as it has neither %s nor %s."
            logger.warning(text, path, CONFIG_FILE, METRICS_FILE)
            folders.clear()
        folders[:] = sorted(name for name in folders if not name.startswith("."))


def describe_run(directory: str, metrics: RunMetrics, name: str) -> Run:
    """Returns a run as its files tell.

    Args:
        directory: Folder of the run.
        metrics: Its metrics, up to date.
        name: Name to give it.
    """
    curves = metrics.curves
    step = max((x.last[0] for x in curves.values()), default=0)
    files = [os.path.join(directory, x) for x in (CONFIG_FILE, METRICS_FILE, EVENTS_FILE)]
    config = ""
    if os.path.exists(files[0]):
        with open(files[0], encoding="utf-8", errors="replace") as file:
            config = file.read()
    found = re.search(r"^max_step: (\d+)$", config, re.MULTILINE)
    max_step = int(found[1]) if found else None
    run_folder = RunFolder(directory)
    events = run_folder.events()
    state, cause = _state(directory, events, max_step is not None and step >= max_step)
    if state == "finished" and (lost := _lost_checkpoint(run_folder.checkpoints)):
        state, cause = "failed", lost
    origin = next((x for x in events if x["event"] == "init_from"), {})
    start = next((x for x in reversed(events) if x["event"] == "start"), {})
    is_validation = re.compile(VALIDATION)
    unit = "examples" if metrics.last("examples_per_second") is not None else "tokens"
    return Run(
        name=name,
        state=state,
        cause=cause,
        step=step,
        max_step=max_step,
        phase=start.get("phase") or "",
        loss=metrics.last("mean_loss" if "mean_loss" in curves else "loss"),
        validation={
            key: (x.last[1], x.least[1] if math.isfinite(x.least[1]) else None, x.least[0])
            for key, x in sorted(curves.items())
            if is_validation.fullmatch(key)
        },
        rate=metrics.last(f"{unit}_per_second"),
        rate_unit=f"{unit}/s",
        goodput=metrics.last("goodput"),
        changed=max((os.path.getmtime(x) for x in files if os.path.exists(x)), default=0.0),
        origin=origin_text(origin) if origin else "",
        damage=metrics.reader.damage(),
    )


def _state(directory: str, events: Sequence[Mapping[str, Any]], is_done: bool) -> tuple[str, str]:
    """Returns the state of a run and its cause; of a run without events, by its last step."""
    if is_locked(directory):
        return "running", ""
    last = next((x for x in reversed(events) if x["event"] in ("start", "end")), None)
    if last is None:
        return "finished" if is_done else "stopped", ""
    if last["event"] == "start":
        return "failed", "it ended without a line in its log, as when it is killed"
    if error := last.get("error"):
        return "failed", str(error)
    stopped_by = last.get("stopped_by")
    return ("stopped", str(stopped_by)) if stopped_by else ("finished", "")


def _lost_checkpoint(folder: str) -> str:
    """Returns which checkpoint lacks its record, if no other one has its; stores are not read."""
    with contextlib.suppress(UserError):  # It cannot be listed.
        lost = [] if storage.is_remote(folder) else list_lost(folder)
        if lost and not list_checkpoints(folder):
            return f"{lost[-1]} has no {RECORD_FILE}, and is the only checkpoint: put the file back"
    return ""


def list_runs(folders: Sequence[str]) -> list[Run]:
    """Returns the runs at or below folders.

    Raises:
        UserError: If there is no run at or below one of them, or it is a URL.
    """
    found = []
    for folder in folders:
        storage.require_local("a folder of runs", folder, "copy the runs there")
        paths = list(find_runs(folder))
        if not paths:
            reason = "no run below it" if os.path.isdir(folder) else "there is no such folder"
            raise UserError(f"{folder}: {reason}; name folders of runs (with {CONFIG_FILE}).")
        for path in paths:
            metrics = RunMetrics(MetricsReader(path, only_last=True), limit=0)
            metrics.update()
            found.append(describe_run(path, metrics, path))
    return found


def runs_table(runs: Sequence[Run]) -> Table:
    """Returns runs as a table, with damaged lines and causes of ends as footnotes."""
    rows, notes = [], []
    for run in runs:
        last, best, at = next(iter(run.validation.values()), (None, None, 0))
        rows.append(
            [
                run.name,
                run.state,
                f"{run.step:,}"
                + (f" / {run.max_step:,}" if run.max_step else "")
                + (f", {run.phase}" if run.phase else ""),
                _number(run.loss, ".4f"),
                _number(last, ".4f"),
                f"{best:.4f} at {at:,}" if best is not None else "",
                f"{run.rate:,.0f} {run.rate_unit}" if run.rate is not None else "",
                _number(run.goodput, ".1%"),
                time.strftime("%Y-%m-%d %H:%M", time.localtime(run.changed)),
                run.origin,
            ]
        )
        notes += [f"{run.name}: {text.rstrip('.')}." for text in (run.cause, run.damage) if text]
    if any(len(run.validation) > 1 for run in runs):
        notes.append("Validation: the first evaler by name; --json shows all.")
    columns = ["run", "state", "step>", "loss>", "validation>", "best>", "rate>", "goodput>"]
    return Table("Runs", [*columns, "changed", "origin"], rows, notes)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def seconds_left(run: Run, metrics: RunMetrics) -> float | None:
    """Returns the estimated seconds to the end of a run; None if it does not run or is new.

    The time of evaluations and checkpoints counts as in the last log interval.
    """
    per_step = metrics.last("step_seconds")
    if run.state != "running" or run.max_step is None or per_step is None:
        return None
    share = sum(metrics.last(f"time/{part}") or 0.0 for part in ("step", "input"))
    return max(run.max_step - run.step, 0) * per_step / (share or 1.0)
