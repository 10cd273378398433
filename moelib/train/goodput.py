"""Goodput: the share of a run's time, over all of its starts, in which it took steps that it kept.

A record holds `time`, `step` and, cumulative since the first start of the run, the seconds
`productive_seconds` and `time_lost/<category>`. Lines of `metrics.jsonl` are records, and so are
the events "restored", "compiled" and "end" in the log of the run.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from moelib.core.errors import UserError
from moelib.core.metrics import Scalars
from moelib.core.metrics_file import read_metrics
from moelib.train.run_log import log_event, read_events

logger = logging.getLogger(__name__)

PRODUCTIVE = "productive_seconds"
# {category of the library ml-goodput-measurement: title}; compilation, and the first step with it,
# are no part of start-up here.
CATEGORIES = {
    "program_startup": "startup",
    "compilation": "compilation",
    "data_loading": "input",
    "checkpoint_save": "save",
    "checkpoint_restore": "restore",
    "evaluation": "evaluation",
    "wasted_progress": "steps taken again",
    "infrastructure_recovery": "waiting",
}
_LOST = [f"time_lost/{category}" for category in CATEGORIES]
STARTUP, COMPILATION, DATA, SAVE, RESTORE, EVALUATION, WASTED, WAITING = _LOST
_NAMES = (PRODUCTIVE, *_LOST)
_Records = Sequence[Mapping[str, Any]]
# {part of `moelib.train.throughput`: its metric}
_OF_PART = {"step": PRODUCTIVE, "input": DATA, "checkpoint": SAVE, "evaluation": EVALUATION}


def goodput(events: _Records, lines: _Records = ()) -> Scalars:
    """Returns `goodput` (0 to 1) and the seconds of a run up to its newest record.

    The seconds are `productive_seconds` and `time_lost/<category>`; a run without a record has none
    of them. `events` is the log of the run, `lines` those of its metrics, newer while it runs.
    """
    records = [x for x in (*events, *lines) if PRODUCTIVE in x]
    if not records:
        return {}
    newest = max(records, key=_age)
    return _with_share({name: newest.get(name) or 0.0 for name in _NAMES})


def carried_over(events: _Records, lines: _Records, step: int, now: float) -> Scalars:
    """Returns the seconds of a run up to `now` (since 1970), when it starts again from `step`.

    The time of later steps, of which `lines` still has the metrics, was wasted. The time since the
    last record counts as infrastructure recovery.
    """
    records = sorted((x for x in (*events, *lines) if PRODUCTIVE in x), key=_age)
    spent = dict.fromkeys(_NAMES, 0.0) | goodput(records)
    spent.pop("goodput", None)
    at_step = {0: 0.0} | {x["step"]: x[PRODUCTIVE] or 0.0 for x in records}
    steps = sorted(x for x in at_step if not records or x <= records[-1]["step"])
    kept = float(np.interp(step, steps, [at_step[x] for x in steps]))
    spent[WASTED] += max(spent[PRODUCTIVE] - kept, 0.0)
    spent[PRODUCTIVE] = min(spent[PRODUCTIVE], kept)
    first = min((x["time"] for x in events if x["event"] == "start"), default=now)
    spent[WAITING] = max(now - first - (sum(spent.values()) - spent[WAITING]), spent[WAITING])
    return spent


def _age(record: Mapping[str, Any]) -> float:
    """Returns the seconds of a run at a record, which no clock of another host changes."""
    return sum(record.get(name) or 0.0 for name in _NAMES)


def _with_share(seconds: Scalars) -> Scalars:
    total = sum(seconds.values())
    return {"goodput": seconds[PRODUCTIVE] / total if total > 0 else 0.0, **seconds}


class TimeAccount:
    """Seconds of a run, those of its earlier starts included; writes its log on process 0."""

    def __init__(self, directory: str, metrics_path: str) -> None:
        """Begins the time of a start, of a run with this folder and this file of metrics."""
        self._dir, self._metrics_path = directory, metrics_path
        self._time, self._begin = time.time(), time.perf_counter()
        self._restore_seconds = self._compile_seconds = 0.0
        self._carried = dict.fromkeys(_NAMES, 0.0)

    def start(self) -> None:
        """Logs the start, once the folder belongs to this run."""
        self.note("start", time=round(self._time, 3), num_processes=jax.process_count())

    def resume(self, step: int, restore_seconds: float) -> None:
        """Counts the earlier starts; to be called before the metrics after `step` are dropped."""
        self._restore_seconds = restore_seconds if step else 0.0
        if jax.process_index() != 0:
            return
        try:
            names = ("time", *_NAMES)
            lines = [x for x in read_metrics(self._metrics_path, names) if PRODUCTIVE in x]
            events = read_events(self._dir)
            self._carried = carried_over(events, lines, step, self._time)
        except (OSError, UserError) as error:
            logger.error("GOODPUT excludes the earlier starts: %s.", error)
        self.log("restored", step, {}, seconds=round(self._restore_seconds, 3))

    def compiled(self, step: int, seconds: float) -> None:
        """Counts the compilation of the step, and logs it."""
        self._compile_seconds += seconds
        self.log("compiled", step, {}, seconds=round(seconds, 3))

    def metrics(self, parts: Mapping[str, float]) -> Scalars:
        """Returns `goodput` and the seconds of the run up to now.

        `parts` are the seconds of this start by the parts of `Throughput`; the rest is start-up.
        """
        found = dict(self._carried)
        for part, name in _OF_PART.items():
            found[name] += parts.get(part, 0.0)
        found[RESTORE] += self._restore_seconds
        found[COMPILATION] += self._compile_seconds
        counted = sum(parts.values()) + self._restore_seconds + self._compile_seconds
        found[STARTUP] += max(time.perf_counter() - self._begin - counted, 0.0)
        return _with_share(found)

    def log(self, event: str, step: int, parts: Mapping[str, float], **fields: Any) -> None:
        """Logs an event that is a record; see `metrics`."""
        record = {name: round(value, 4) for name, value in self.metrics(parts).items()}
        self.note(event, step=step, **fields, **record)

    def note(self, event: str, **fields: Any) -> None:
        """Logs an event on process 0; a failure is logged, and training continues."""
        if jax.process_index() != 0:
            return
        try:
            log_event(self._dir, event, **fields)
        except (OSError, UserError) as error:
            logger.error("NO EVENT %r in the log of the run: %s. Training continues.", event, error)
