"""Traces of JAX's profiler, over a few steps each."""

import itertools
import logging
import os
from collections.abc import Sequence
from typing import Any

import jax

from moelib.core.errors import UserError
from moelib.runtime import storage
from moelib.train.watcher import Watcher

logger = logging.getLogger(__name__)


class ProfilerWindow(Watcher):
    """Traces windows of steps, the trainer's `start_trace_steps`, into `<dir>/profile`.

    TensorBoard's profile plugin and Perfetto (`perfetto_trace.json.gz`) show the traces.
    """

    def prepare(self, trainer: Any) -> None:
        """Takes the steps to trace; warns of those after the last step.

        Raises:
            UserError: If traces overlap, or cannot be written.
        """
        cfg = trainer.config
        self._starts, self._num_steps = sorted(cfg.start_trace_steps), cfg.num_trace_steps
        self._folder = os.path.join(cfg.dir, "profile")
        self._until: int | None = None  # Last step of the current trace.
        for a, b in itertools.pairwise(self._starts):
            if b < a + self._num_steps:
                raise UserError(
                    f"start_trace_steps: the traces of {self._num_steps} steps from {a} and from "
                    f"{b} overlap; leave {self._num_steps} steps or more between them."
                )
        if self._starts and storage.is_remote(cfg.dir):
            raise UserError(
                f"start_trace_steps is {self._starts}, but dir is {cfg.dir!r}: traces are written "
                "to local folders; set dir to one in a run that is traced."
            )
        if late := [step for step in self._starts if step > cfg.max_step]:
            logger.warning(
                "start_trace_steps %s: no trace begins there, because max_step is %d.",
                late,
                cfg.max_step,
            )

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
        return [("traces", self._folder)] if self._starts else []

    def _start(self, step: int) -> None:
        if step in self._starts and self._until is None:
            jax.profiler.start_trace(self._folder)
            self._until = step + self._num_steps - 1

    def _stop(self) -> None:
        if self._until is not None:
            self._until = None
            jax.profiler.stop_trace()
            logger.info("Wrote a trace to %s", self._folder)
