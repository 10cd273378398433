"""Graceful stops: SIGTERM and SIGINT request that a run saves and ends."""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
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


@contextlib.contextmanager
def ended_by_sigterm(doing: str) -> Iterator[None]:
    """Lets SIGTERM end the process at once, with a line that says what it was doing.

    For work with nothing to save, which may not return to Python for minutes. With several
    processes, JAX's own handler stays.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or jax.process_count() > 1:
        yield
        return
    receiver, sender = socket.socketpair()
    sender.setblocking(False)

    def end() -> None:
        while number := receiver.recv(1):
            if number[0] == signal.SIGTERM:
                text = f"SIGTERM while {doing}: there is nothing to save. The same command resumes."
                print(text, file=sys.stderr, flush=True)
                os._exit(128 + signal.SIGTERM)

    with receiver, sender:
        thread = threading.Thread(target=end, daemon=True)
        thread.start()
        before = signal.signal(signal.SIGTERM, lambda number, frame: None)
        descriptor = signal.set_wakeup_fd(sender.fileno())  # Written to by the C handler.
        try:
            yield
        finally:
            signal.set_wakeup_fd(descriptor)
            signal.signal(signal.SIGTERM, before)
            sender.shutdown(socket.SHUT_RDWR)
            thread.join()
