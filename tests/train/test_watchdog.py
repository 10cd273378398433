"""The watchdog: stacks when nothing moves, silence when it does."""

import subprocess
import sys
import time

import pytest

from moelib.train.watchdog import EXIT_CODE, Watchdog


def watch(tmp_path, seconds, beats):
    with open(tmp_path / "stacks", "w+") as stream:
        with Watchdog(0.2, stream=stream) as dog:
            for _ in range(beats):
                dog.beat(7)
                time.sleep(seconds / max(beats, 1))
            time.sleep(0 if beats else seconds)
        stream.seek(0)
        return stream.read()


def test_stacks_of_a_hang(tmp_path):
    said = watch(tmp_path, 0.6, beats=1)
    assert said.count("after step 7; all threads:") == 1
    assert "test_watchdog.py" in said


def test_silence_while_steps_end_and_before_the_first(tmp_path):
    assert watch(tmp_path, 0.6, beats=12) == ""
    assert watch(tmp_path, 0.4, beats=0) == ""


def test_pause_stops_the_clock(tmp_path):
    with open(tmp_path / "stacks", "w+") as stream, Watchdog(0.1, stream=stream) as dog:
        dog.beat(1)
        dog.pause()
        time.sleep(0.3)
        assert stream.tell() == 0


def test_process_exits_if_asked():
    code = (
        "import time\nfrom moelib.train.watchdog import Watchdog\n"
        "with Watchdog(None, crash_timeout_seconds=0.2) as dog:\n"
        "    dog.beat(3)\n    time.sleep(30)\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=25, check=False)
    assert done.returncode == EXIT_CODE
    assert "after step 3" in done.stderr


def test_timeout_of_nothing_is_refused():
    with pytest.raises(ValueError, match="watchdog_timeout_seconds is 0; set it above 0"):
        Watchdog(0)
