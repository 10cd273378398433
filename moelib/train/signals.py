"""Stopping in good order: SIGTERM and SIGINT ask a run to save and end."""

import signal
import threading
from types import FrameType
from typing import Any, Self

import jax


class StopRequest:
    """Whether somebody asked the run to stop. Use it in a `with`, on the main thread.

    Inside, the first SIGTERM or SIGINT only sets `signal_name`; a second SIGINT interrupts.
    With several processes all of them stop at the same step once one has got SIGTERM, which
    `jax.distributed.initialize` listens for; SIGINT then interrupts as ever.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            # With several processes JAX's own handler tells all of them of SIGTERM: it must stay.
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

    def asked(self, step: int) -> bool:
        """Returns whether to stop after this step; the same on all processes."""
        if jax.process_count() == 1:
            return self.signal_name is not None
        from jax.experimental import multihost_utils

        if multihost_utils.reached_preemption_sync_point(step):
            self.signal_name = self.signal_name or "SIGTERM"
            return True
        return False
