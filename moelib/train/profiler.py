"""Traces of JAX's profiler, over a few steps each."""

import itertools
import logging
import os
from collections.abc import Sequence

import jax

from moelib.core.errors import UserError

logger = logging.getLogger(__name__)


class ProfilerWindow:
    """Traces windows of steps into `<dir>/profile`.

    TensorBoard's profile plugin and Perfetto (`perfetto_trace.json.gz`) show the traces.
    """

    def __init__(
        self, directory: str, start_steps: Sequence[int], num_steps: int = 3, *, max_step: int
    ) -> None:
        """Checks the settings: a trace of `num_steps` steps from each of `start_steps`, 1 or more.

        Traces that begin after `max_step`, the last step, are reported.

        Raises:
            UserError: If there is no step to trace, or two traces overlap.
        """
        starts = sorted(start_steps)
        if num_steps < 1 or (starts and starts[0] < 1):
            raise UserError(
                f"start_trace_steps {list(start_steps)}, num_trace_steps {num_steps}: steps and "
                "their number start at 1."
            )
        for a, b in itertools.pairwise(starts):
            if b < a + num_steps:
                raise UserError(
                    f"start_trace_steps: the traces of {num_steps} steps from {a} and from {b} "
                    f"overlap; leave {num_steps} steps or more between them."
                )
        if late := [step for step in starts if step > max_step]:
            logger.warning(
                "start_trace_steps %s: no trace begins there, because max_step is %d.",
                late,
                max_step,
            )
        self._starts, self._num = set(starts), num_steps
        self.directory = os.path.join(directory, "profile")
        self._until: int | None = None

    def before_step(self, step: int) -> None:
        """Starts a trace if one is due before this step."""
        if step in self._starts and self._until is None:
            jax.profiler.start_trace(self.directory)
            self._until = step + self._num - 1

    def ends_after(self, step: int) -> bool:
        """Returns whether a trace ends with this step, which must have finished before `stop`."""
        return self._until is not None and step >= self._until

    def stop(self) -> None:
        """Ends the current trace, if any."""
        if self._until is not None:
            self._until = None
            jax.profiler.stop_trace()
            logger.info("Wrote a trace to %s", self.directory)
