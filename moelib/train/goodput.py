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

from moelib.checkpoint.restore import first_line
from moelib.core.errors import UserError
from moelib.core.metrics import Scalars
from moelib.core.metrics_file import read_metrics
from moelib.runtime.progress import format_seconds
from moelib.train.run_log import read_events
from moelib.train.watcher import GoBack, Watcher

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


class Goodput(Watcher):
    """The account of a run's time, its earlier starts included; logs records on process 0."""

    def started(self) -> None:
        """Counts the earlier starts; called before the metrics after the first step are dropped."""
        run = self.run
        self._carried = dict.fromkeys(_NAMES, 0.0)
        self._is_compiled = False
        if jax.process_index() == 0:
            try:
                lines = [
                    x for x in read_metrics(run.metrics_path, ("time", *_NAMES)) if PRODUCTIVE in x
                ]
                events = read_events(run.config.dir)
                self._carried = carried_over(events, lines, run.step, run.began)
            except (OSError, UserError) as error:
                logger.error("GOODPUT excludes the earlier starts: %s.", error)
        self._log("restored", seconds=round(self._restore_seconds, 3))

    @property
    def _restore_seconds(self) -> float:
        return self.run.restore_seconds if self.run.start_step else 0.0

    def step_done(self, step: int, scalars: Scalars) -> Scalars:
        """Adds `goodput` and the seconds of the run up to now, if the step is logged."""
        return scalars | self.metrics() if self.run.is_logged(step) else scalars

    def between_steps(self, step: int) -> None:
        """Logs the compilation, in the first step."""
        if not self._is_compiled:
            self._is_compiled = True
            self._log("compiled", step=step, seconds=round(self.run.compile_seconds, 3))

    def ended(self) -> None:
        """Logs the end of this start, and its error or what stopped it."""
        run = self.run
        fields = {"stopped_by": run.stopped_by} if run.stopped_by else {}
        if isinstance(run.error, GoBack):
            fields = {"stopped_by": run.error.reason}
        elif run.error is not None:
            fields = {"error": first_line(run.error)}
        self._log("end", **fields)

    def rows(self) -> Sequence[tuple[str, str]]:
        """Returns the row with the goodput and the seconds of what is lost."""
        return [("goodput", goodput_text(self.metrics()))]

    def metrics(self) -> Scalars:
        """Returns `goodput` and the seconds of the run up to now; what is not timed is start-up."""
        run, found = self.run, dict(self._carried)
        parts = {_OF_PART[part]: seconds for part, seconds in run.seconds().items()}
        parts |= {RESTORE: self._restore_seconds, COMPILATION: run.compile_seconds}
        for name, seconds in parts.items():
            found[name] += seconds
        found[STARTUP] += max(time.time() - run.began - sum(parts.values()), 0.0)
        return _with_share(found)

    def _log(self, event: str, **fields: Any) -> None:
        """Logs an event that is a record."""
        record = {name: round(value, 4) for name, value in self.metrics().items()}
        self.run.note(event, **{"step": self.run.step, **fields}, **record)


def goodput_text(scalars: Scalars) -> str:
    """Returns the goodput of a run over all of its starts, with the seconds of what is lost."""
    lost = [(title, scalars[f"time_lost/{name}"]) for name, title in CATEGORIES.items()]
    parts = [f"{title} {format_seconds(x)}" for title, x in lost if x >= 0.05]
    return f"{scalars['goodput']:.1%}" + (f" ({', '.join(parts)})" if parts else "")
