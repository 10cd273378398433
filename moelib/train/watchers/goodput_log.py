"""The watcher that accounts for a run's time and logs records of its goodput."""

import logging
import time
from collections.abc import Sequence
from typing import Any

import jax

from moelib.core.errors import UserError, first_line
from moelib.core.metrics import Scalars
from moelib.runs.goodput import (
    COMPILATION,
    DATA,
    EVALUATION,
    NAMES,
    PRODUCTIVE,
    RESTORE,
    SAVE,
    STARTUP,
    carried_over,
    goodput_text,
    with_share,
)
from moelib.runs.metrics_file import read_metrics
from moelib.train.watcher import GoBack, Watcher

logger = logging.getLogger(__name__)

# {part of `moelib.train.throughput`: its metric}
_OF_PART = {"step": PRODUCTIVE, "input": DATA, "checkpoint": SAVE, "evaluation": EVALUATION}


class Goodput(Watcher):
    """The account of a run's time, its earlier starts included; logs records on process 0."""

    def started(self) -> None:
        """Counts the earlier starts; called before the metrics after the first step are dropped."""
        run = self.run
        self._carried = dict.fromkeys(NAMES, 0.0)
        self._is_compiled = False
        if jax.process_index() == 0:
            try:
                lines = [
                    x for x in read_metrics(run.metrics_path, ("time", *NAMES)) if PRODUCTIVE in x
                ]
                self._carried = carried_over(run.folder.events(), lines, run.step, run.start.began)
            except (OSError, UserError) as error:
                logger.error("GOODPUT excludes the earlier starts: %s.", error)
        self._log("restored", seconds=round(self._restore_seconds, 3))

    @property
    def _restore_seconds(self) -> float:
        return self.run.start.restore_seconds if self.run.start.step else 0.0

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
        found[STARTUP] += max(time.time() - run.start.began - sum(parts.values()), 0.0)
        return with_share(found)

    def _log(self, event: str, **fields: Any) -> None:
        """Logs an event that is a record."""
        record = {name: round(value, 4) for name, value in self.metrics().items()}
        self.run.note(event, **{"step": self.run.step, **fields}, **record)
