"""Graceful stops: SIGTERM and SIGINT request that a run saves and ends."""

import signal
import threading
from types import FrameType
from typing import Any, Self

import jax


class StopRequest:
    """A request to stop, for a `with` block on the main thread.

    Inside it, the first SIGTERM or SIGINT only sets `signal_name`; a second SIGINT interrupts.
    Several processes all stop at the same call of `requested` once one of them has received
    SIGTERM, which `jax.distributed.initialize` handles; SIGINT then interrupts as usual.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._before: dict[int, Any] = {}
        self._num_calls = 0  # Calls of `requested`, the clock on which processes agree.

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            # With several processes JAX's own handler, which notifies all of them, must stay.
            for number in (signal.SIGINT, signal.SIGTERM) if jax.process_count() == 1 else ():
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *unused: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.signal_name is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name

    def requested(self) -> bool:
        """Returns whether to stop now, equal on all processes, which call this equally often."""
        if self.signal_name is not None or jax.process_count() == 1:
            return self.signal_name is not None
        from jax.experimental import multihost_utils

        self._num_calls += 1
        if multihost_utils.reached_preemption_sync_point(self._num_calls):
            self.signal_name = "SIGTERM"
        return self.signal_name is not None
