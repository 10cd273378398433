"""The watchdog: stacks when no step ends for too long, and nothing otherwise."""

import math
import time

import pytest

from moelib.train.watcher import Activity
from moelib.train.watchers.watchdog import EXIT_CODE, Watchdog
from tests.python_process import finish, start


class Clock:
    """A watchdog on a clock that only moves when told to."""

    def __init__(self, path, monkeypatch):
        self.now, self._stream = 100.0, open(path, "w+")  # noqa: SIM115
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        cfg = Watchdog.default_config().set(timeout_seconds=10.0)
        self.activity, self._dog = Activity(), cfg.instantiate(stream=self._stream)

    def after(self, seconds):
        """Returns what the watchdog has printed in total after some more seconds."""
        self.now += seconds
        self._dog.check(self.activity)
        self._stream.seek(0)
        return self._stream.read()


@pytest.fixture
def clock(tmp_path, monkeypatch):
    clock = Clock(tmp_path / "stacks", monkeypatch)
    yield clock
    clock._stream.close()


def test_stacks_of_a_hang_are_printed_once_per_step(clock):
    clock.activity.beat(7)
    assert clock.after(9) == ""
    printed = clock.after(2)
    assert "no step for 11 s after step 7; all threads:" in printed
    assert "test_watchdog.py" in printed
    assert clock.after(99) == printed
    clock.activity.beat(8)
    assert "after step 8" in clock.after(11)


def test_data_that_are_late_are_named(clock):
    clock.activity.beat(7)
    clock.activity.cause = ", as the input of this process has no batch"
    assert "after step 7, as the input of this process has no batch;" in clock.after(11)


def test_nothing_is_printed_while_steps_end_and_before_the_first(clock):
    assert clock.after(99) == ""
    for step in range(5):
        clock.activity.beat(step)
        assert clock.after(9) == ""


def test_pause_stops_the_clock(clock):
    clock.activity.beat(1)
    clock.activity.pause()
    assert clock.after(99) == ""


def test_process_exits_after_the_crash_timeout():
    code = (
        "import time\nfrom moelib.train.watchers.watchdog import Watchdog\n"
        "from moelib.train.watcher import Activity\n"
        "cfg = Watchdog.default_config().set(timeout_seconds=None, crash_timeout_seconds=0.2)\n"
        "with cfg.instantiate().watch(Activity(3, time.monotonic())):\n"
        "    time.sleep(30)\n"
    )
    [(_, err)] = finish(start("-c", code), code=EXIT_CODE)
    assert "after step 3" in err


@pytest.mark.parametrize("seconds", [0, math.nan, math.inf])
def test_timeout_that_is_no_positive_number_is_refused(seconds):
    with pytest.raises(ValueError, match=f"timeout_seconds={seconds}:"):
        Watchdog.default_config().set(timeout_seconds=seconds).instantiate()
