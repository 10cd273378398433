"""The example of phases: killed in each of them, it ends with the numbers of a run that was not."""

import time

import pytest

from moelib.checkpoint.restore import restore_arrays
from moelib.runs.folder import RunFolder
from tests import tiny
from tests.python_process import finish, start


def command(directory):
    flags = "--module=experiments.long_run", "--config=three-phases-tiny"
    return "-m", "moelib", "train", *flags, f"--trainer_dir={directory}"


def kill_after(directory, step):
    """Runs the command, and kills it once a step has been logged."""
    process = start(*command(directory), devices=1)
    metrics = directory / "metrics.jsonl"
    deadline = time.monotonic() + 280
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and f'"step": {step},' in metrics.read_text():
            break
        time.sleep(0.05)
    was_running = process.poll() is None
    process.kill()
    process.communicate()
    return was_running


@pytest.mark.slow
def test_a_run_that_is_killed_in_each_phase_has_the_same_numbers(tmp_path):
    finish(start(*command(tmp_path / "whole"), devices=1))
    assert all(kill_after(tmp_path / "killed", step) for step in (15, 35, 45))
    finish(start(*command(tmp_path / "killed"), devices=1))
    whole, killed = (
        restore_arrays(RunFolder(tmp_path / name).checkpoints, step=50).state
        for name in ("whole", "killed")
    )
    tiny.assert_trees_equal(killed, whole)
    assert tiny.losses(tmp_path / "killed") == tiny.losses(tmp_path / "whole")
