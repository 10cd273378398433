"""The watchdog: prints the stacks of all threads when no step has ended for too long."""

import faulthandler
import math
import os
import sys
import threading
import time
from typing import Self, TextIO

import jax

from moelib.core.errors import UserError

EXIT_CODE = 87  # Exit status of a process that the watchdog ends.
# From the stacks of a process to its end, in which the others of its job, which wait for the same
# step, print theirs.
_GRACE_SECONDS = 10.0


class Watchdog:
    """Prints the stacks of all threads after some seconds without a step; can end the process.

    For a `with` block, with a call of `beat` after every step. It is idle until the first beat.
    """

    def __init__(
        self,
        timeout_seconds: float | None,
        *,
        crash_timeout_seconds: float | None = None,
        stream: TextIO | None = None,
    ) -> None:
        """Checks the settings.

        Args:
            timeout_seconds: Seconds without a step before stacks are printed; None for never.
            crash_timeout_seconds: Seconds before the process exits with code 87, so that
                a supervisor can restart it; None for never.
            stream: Output for the stacks, a file with a descriptor; by default stderr.

        Raises:
            UserError: If a timeout is not positive and finite.
        """
        for name, value in (
            ("watchdog_timeout_seconds", timeout_seconds),
            ("crash_on_hang_timeout_seconds", crash_timeout_seconds),
        ):
            if value is not None and not 0 < value < math.inf:
                raise UserError(
                    f"{name} is {value}; set a number above 0, or None for no watchdog."
                )
        self._timeout, self._crash = timeout_seconds, crash_timeout_seconds
        self._stream = stream or sys.stderr
        self._stop = threading.Event()
        self._last: tuple[int, float] | None = None
        self._reported: int | None = None
        self.cause = ""  # Of a step that does not end, if it is known: shown in reports.
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def beat(self, step: int) -> None:
        """Restarts the clock: a step, or other work after it, has ended."""
        self._last = (step, time.monotonic())

    def pause(self) -> None:
        """Stops the clock until the next beat, during work that may take long."""
        self._last = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        limits = [seconds for seconds in (self._timeout, self._crash) if seconds is not None]
        while limits and not self._stop.wait(min(min(limits) / 4, 5.0)):
            self.check()

    def check(self) -> None:
        """Reports a hang, once per step, or ends the process; called by the watchdog's thread."""
        if self._last is None:
            return
        step, since = self._last[0], time.monotonic() - self._last[1]
        if self._timeout is not None and since > self._timeout and self._reported != step:
            self._reported = step
            self._report(step, since)
        if self._crash is not None and since > self._crash:
            self._report(step, since)
            if jax.process_count() > 1:
                time.sleep(_GRACE_SECONDS)
            print(f"Watchdog: exits with code {EXIT_CODE}.", file=self._stream, flush=True)
            os._exit(EXIT_CODE)

    def _report(self, step: int, seconds: float) -> None:
        print(
            f"Watchdog: no step for {seconds:.0f} s after step {step}{self.cause}; all threads:",
            file=self._stream,
            flush=True,
        )
        faulthandler.dump_traceback(file=self._stream, all_threads=True)
