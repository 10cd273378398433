"""Traces of JAX's profiler, over a few steps each."""

import itertools
import logging
import os
from collections.abc import Sequence
from typing import Any

import jax

from moelib.core.config import config_class
from moelib.core.config_types import PositiveInt
from moelib.core.errors import UserError
from moelib.runtime import storage
from moelib.train.watcher import Watcher

logger = logging.getLogger(__name__)


class ProfilerWindow(Watcher):
    """Traces windows of steps into `<dir>/profile`.

    TensorBoard's profile plugin and Perfetto (`perfetto_trace.json.gz`) show the traces.
    """

    @config_class
    class Config(Watcher.Config):
        start_steps: Sequence[PositiveInt] = ()  # Steps before which a trace starts.
        num_steps: PositiveInt = 3  # Steps per trace.

    def __init__(self, cfg: Config) -> None:
        """Checks the settings. Raises UserError if traces overlap."""
        super().__init__(cfg)
        num_steps = self.config.num_steps
        for a, b in itertools.pairwise(sorted(self.config.start_steps)):
            if b < a + num_steps:
                raise UserError(
                    f"start_trace_steps: the traces of {num_steps} steps from {a} and from {b} "
                    f"overlap; leave {num_steps} steps or more between them."
                )
        self._until: int | None = None  # Last step of the current trace.

    def prepare(self, trainer: Any) -> None:
        """Raises UserError if traces cannot be written; warns of those after the last step."""
        directory, max_step = trainer.config.dir, trainer.config.max_step
        if self.config.start_steps and storage.is_remote(directory):
            raise UserError(
                f"start_trace_steps is {list(self.config.start_steps)}, but dir is {directory!r}: "
                "traces are written to local folders; set dir to one in a run that is traced."
            )
        if late := [step for step in self.config.start_steps if step > max_step]:
            logger.warning(
                "start_trace_steps %s: no trace begins there, because max_step is %d.",
                late,
                max_step,
            )

    @property
    def directory(self) -> str:
        """The folder of the traces."""
        return os.path.join(self.run.config.dir, "profile")

    def started(self) -> None:
        """Starts a trace if one is due before the first step."""
        self._start(self.run.step + 1)

    def between_steps(self, step: int) -> None:
        """Ends the current trace after its last step, and starts one before the next step."""
        if self._until is not None and step >= self._until:
            self.run.wait()
            self._stop()
        self._start(step + 1)

    def ended(self) -> None:
        """Ends the current trace, if any."""
        self._stop()

    def rows(self) -> Sequence[tuple[str, str]]:
        """Returns the row with the folder of the traces."""
        return [("traces", self.directory)] if self.config.start_steps else []

    def _start(self, step: int) -> None:
        if step in self.config.start_steps and self._until is None:
            jax.profiler.start_trace(self.directory)
            self._until = step + self.config.num_steps - 1

    def _stop(self) -> None:
        if self._until is not None:
            self._until = None
            jax.profiler.stop_trace()
            logger.info("Wrote a trace to %s", self.directory)
