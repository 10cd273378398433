"""The evaluations of a run: their latest metrics, and whether these compare with earlier ones."""

import logging
import math
from collections.abc import Mapping

from moelib.checkpoint.contents import CheckpointRecord
from moelib.core.config import did_you_mean
from moelib.core.errors import UserError
from moelib.core.metrics import Scalars
from moelib.data.batches.input import changes
from moelib.train.evaler import SpmdEvaler
from moelib.train.watcher import Run

logger = logging.getLogger(__name__)


class Evaluations:
    """The evalers of a run, whose input and metrics are compared with those of a checkpoint.

    Attributes:
        latest: Latest metrics of each evaler, by its name.
    """

    def __init__(
        self,
        evalers: Mapping[str, SpmdEvaler],
        record: CheckpointRecord | None,
        *,
        best_metric: str | None,
        weight: str,
    ) -> None:
        """Continues after a checkpoint.

        Args:
            evalers: Evalers by name.
            record: Record of the checkpoint; None for a run from its beginning.
            best_metric: Metric, "<evaler>/<metric>", whose best checkpoint is kept.
            weight: Metric that is the weight of an evaluation.
        """
        self._evalers, self._record = evalers, record
        self._best_metric, self._weight = best_metric or "", weight
        self.latest: dict[str, Scalars] = {}
        for path, value in ({} if record is None else record.metrics).items():
            name, _, metric = path.partition("/")
            self.latest.setdefault(name, {})[metric] = value

    def open(self, run: Run) -> None:
        """Opens all inputs and runs what may fail, so that errors surface before the first step."""
        for name, evaler in self._evalers.items():
            evaler.open_input(run.mesh)
            self._warn_of_other_data(name, evaler)
            evaler.try_out(run.eval_params(), run.mesh)

    def due(self, step: int, done: Scalars) -> dict[str, SpmdEvaler]:
        """Returns the evalers that are due at a step, without those that have metrics in `done`."""
        ran = {name.partition("/")[0] for name in done}
        return {
            name: evaler
            for name, evaler in self._evalers.items()
            if name not in ran and evaler.should_evaluate(step=step)
        }

    def add(self, name: str, scalars: Scalars) -> None:
        """Keeps the metrics of an evaler."""
        self._warn_of_other_weight(name, scalars)
        self.latest[name] = scalars

    def _warn_of_other_data(self, name: str, evaler: SpmdEvaler) -> None:
        """Warns if an evaler's data are not those of the restored checkpoint."""
        before = self._record.evaluated.get(name) if self._record else None
        now = evaler.input_identity
        if before and now and (changed := changes(before, now)):
            logger.warning(
                "evalers.%s.input has changed: %.400s. Its metrics do not compare with earlier "
                "ones, and the best checkpoint is chosen among both; use a new run for other data.",
                *(name, changed),
            )

    def _warn_of_other_weight(self, name: str, scalars: Scalars) -> None:
        """Warns of evaluations on other data that an input's identity does not tell apart."""
        before, now = self.latest.get(name, {}).get(self._weight), scalars.get(self._weight)
        is_best = self._best_metric.startswith(f"{name}/")
        if is_best and before and now and not math.isclose(before, now, rel_tol=1e-3):
            logger.warning(
                "%s: evaluated on a weight of %g, and of %g before this run; the best checkpoint "
                "is chosen among both. Start a new run for other data.",
                *(name, now, before),
            )

    def check_best_metric(self, summaries: Scalars) -> None:
        """Raises UserError if the evaler of the best metric has run, and has no such metric."""
        metric = self._best_metric
        evaler = f"{metric.partition('/')[0]}/"
        if metric and metric not in summaries and any(x.startswith(evaler) for x in summaries):
            raise UserError(
                f"checkpointer.best_metric is {metric!r}; {did_you_mean(metric, summaries)}"
            )
