"""The watchdog: prints the stacks of all threads when no step has ended for too long."""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

import jax

from moelib.core.config import config_class
from moelib.core.config_types import PositiveFloat
from moelib.train.watcher import Activity, Watcher

EXIT_CODE = 87  # Exit status of a process that the watchdog ends.
# From the stacks of a process to its end, in which the others of its job, which wait for the same
# step, print theirs.
_GRACE_SECONDS = 10.0


class Watchdog(Watcher):
    """Prints the stacks of all threads after some seconds without a step; can end the process."""

    @config_class
    class Config(Watcher.Config):
        # Seconds without a step before stacks are printed; None for never.
        timeout_seconds: PositiveFloat | None = None
        # Seconds before the process exits with status 87, so that a supervisor can restart it; None
        # for never.
        crash_timeout_seconds: PositiveFloat | None = None

    def __init__(self, cfg: Config, *, stream: TextIO | None = None) -> None:
        """Takes the output for the stacks, a file with a descriptor; by default stderr."""
        super().__init__(cfg)
        self._timeout = self.config.timeout_seconds
        self._crash = self.config.crash_timeout_seconds
        self._stream = stream or sys.stderr
        self._reported: int | None = None
        self._watching = contextlib.ExitStack()

    def started(self) -> None:
        """Starts to watch the run."""
        self._watching.enter_context(self.watch(self.run.activity))

    def ended(self) -> None:
        """Stops watching."""
        self._watching.close()

    @contextlib.contextmanager
    def watch(self, activity: Activity) -> Iterator[None]:
        """Watches, in the body and in a thread of its own, that an activity goes on."""
        stop = threading.Event()
        limits = [seconds for seconds in (self._timeout, self._crash) if seconds is not None]

        def check_until_stopped() -> None:
            while limits and not stop.wait(min(min(limits) / 4, 5.0)):
                self.check(activity)

        thread = threading.Thread(target=check_until_stopped, name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def check(self, activity: Activity) -> None:
        """Reports a hang, once per step, or ends the process."""
        if activity.since is None:
            return
        seconds = time.monotonic() - activity.since
        is_late = self._timeout is not None and seconds > self._timeout
        if is_late and self._reported != activity.step:
            self._reported = activity.step
            self._report(activity, seconds)
        if self._crash is not None and seconds > self._crash:
            self._report(activity, seconds)
            if jax.process_count() > 1:
                time.sleep(_GRACE_SECONDS)
            print(f"Watchdog: exits with code {EXIT_CODE}.", file=self._stream, flush=True)
            os._exit(EXIT_CODE)

    def _report(self, activity: Activity, seconds: float) -> None:
        print(
            f"Watchdog: no step for {seconds:.0f} s after step {activity.step}{activity.cause}; "
            "all threads:",
            file=self._stream,
            flush=True,
        )
        faulthandler.dump_traceback(file=self._stream, all_threads=True)
