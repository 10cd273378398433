"""Drills: outcomes of runs, as their events and losses tell, and a real drill."""

import json
import os
import pathlib
import re
import signal
import threading

import pytest

from cloud.local import LocalJob
from moelib.cli.main import run
from moelib.operations import drill, faults
from moelib.operations.drill import Outcome, Scenario, run_drill
from moelib.operations.faults import Fault
from moelib.runs.folder import RunFolder
from tests import tiny

KILL = Scenario("kill", [Fault("kill", faults.STEP, 7, 1)], 5)


def launcher(starts, losses, statuses=(0,)):
    """Returns a function that writes what a run with starts at these steps would."""
    left = list(statuses)

    def launch(folder):
        path = pathlib.Path(folder)
        has_fault = json.loads((path / "faults.json").read_text())
        events, time = [], 0.0
        for i, (first, last) in enumerate(starts if has_fault else [(0, 8)]):
            events.append({"time": time, "start": first})
            for step in range(first + 1, last + 1):
                time += 1
                events.append({"time": time, "step": step})
            if has_fault and i == 0:
                events.append({"time": time, "fault": "kill", "step": last + 1})
                events.append({"time": time + 0.1, "step": last + 1})  # Of a process that survived.
            time += 10
        (path / "drill.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
        lines = [
            {"step": i + 1, "loss": loss} for i, loss in enumerate(losses if has_fault else [1, 2])
        ]
        (path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        return left.pop(0) if has_fault else 0

    return launch


@pytest.fixture
def cfg(tmp_path):
    return tiny.trainer_config(tmp_path / "unused")


def outcome_of(cfg, folder, scenario, *args):
    (found,) = run_drill(cfg, str(folder / "runs"), [scenario], launcher(*args))
    return found


def test_steps_taken_twice_and_the_time_to_recover_are_counted(cfg, tmp_path):
    found = outcome_of(cfg, tmp_path, KILL, [(0, 6), (4, 8)], [1, 2])
    assert found == Outcome(KILL, 0, 2, lost=3, recovery_seconds=11.0, is_equal=True)
    assert found.is_kept


def test_a_line_that_a_kill_cut_short_is_skipped(cfg, tmp_path):
    launch = launcher([(0, 6), (4, 8)], [1, 2])

    def cuts(folder):
        status = launch(folder)
        with open(pathlib.Path(folder, "drill.jsonl"), "a") as file:
            file.write('{"time": 99, "st')
        return status

    (found,) = run_drill(cfg, str(tmp_path / "runs"), [KILL], cuts)
    assert found == Outcome(KILL, 0, 2, lost=3, recovery_seconds=11.0, is_equal=True)


@pytest.mark.parametrize(
    ("starts", "losses", "statuses"),
    [
        ([(0, 6), (0, 8)], [1, 2], [0]),  # Seven steps are lost.
        ([(0, 6), (4, 8)], [1, 2.0000001], [0]),
        ([(0, 6), (4, 8)], [1], [0]),
        ([(0, 6), (4, 8)], [1, 2], [88]),
    ],
)
def test_a_broken_promise_is_shown(cfg, tmp_path, starts, losses, statuses):
    found = outcome_of(cfg, tmp_path, KILL, starts, losses, statuses)
    assert not found.is_kept
    assert drill.drill_table([found], 4).rows[0][-1] == "BROKEN"


def test_a_run_that_ends_with_an_error_is_started_again_by_hand(cfg, tmp_path):
    by_hand = KILL._replace(by_hand=True)
    found = outcome_of(cfg, tmp_path, by_hand, [(0, 6), (4, 8)], [1, 2], [1, 0])
    assert found.is_kept
    assert drill.drill_table([found], 4).rows[0][-1] == "kept, by hand"


def test_a_flipped_bit_that_was_not_found_is_a_broken_promise(cfg, tmp_path):
    checked = KILL._replace(event="device_difference")
    launch = launcher([(0, 6), (4, 8)], [1, 2], [0, 0])

    def finds(folder):
        RunFolder(folder).log("device_difference")
        return launch(folder)

    (lost,) = run_drill(cfg, str(tmp_path / "lost"), [checked], launch)
    (found,) = run_drill(cfg, str(tmp_path / "found"), [checked], finds)
    assert (lost.is_kept, found.is_kept) == (False, True)


def test_random_kills_are_repeatable_and_spread():
    chosen = drill.random_kills(50, 4, 2)
    assert chosen == drill.random_kills(50, 4, 2)
    kills = [fault for each in chosen for fault in each.faults]
    assert len(kills) == 50
    assert {kill.process for kill in kills} == {0, 1}
    steps = {kill.step for kill in kills}
    assert len(steps) > 10
    assert steps <= set(range(2, 17))
    for each in chosen:  # A run cannot go back behind a kill.
        steps = [kill.step for kill in each.faults]
        assert steps == sorted(set(steps))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--devices=3"], "--devices=3"),
        (["--only=earthquake"], "--only=earthquake.*a process is killed in a step"),
        (["--folder=."], "--folder=.: it is not empty"),
        (["--mesh=fdsp=2"], "fdsp"),
    ],
)
def test_wrong_flags_are_refused(capsys, tmp_path, flags, message):
    names = ["--module=flame_moe", "--config=flame-moe-tiny", f"--folder={tmp_path / 'runs'}"]
    assert run(["drill", *names, *flags]) == 2
    assert re.search(message, capsys.readouterr().err)


_NAMES = "drill", "--module=flame_moe", "--config=flame-moe-tiny"


def test_a_folder_that_cannot_be_created_is_named(capsys, tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "runs"):
        assert run([*_NAMES, f"--folder={folder}"]) == 2
        assert "set --folder" in capsys.readouterr().err


def test_a_signal_ends_the_drill_and_names_its_folder(capsys, tmp_path, monkeypatch):
    starts = []

    def start(job):
        starts.append(job.config.folder)
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        return original(job)

    original = LocalJob.start
    monkeypatch.setattr(LocalJob, "start", start)
    with pytest.raises(SystemExit) as error:
        run([*_NAMES, f"--folder={tmp_path / 'runs'}"])
    assert error.value.code == 130
    assert f"its runs are in {tmp_path / 'runs'}" in capsys.readouterr().err
    assert starts == [str(tmp_path / "runs" / "undisturbed" / "job")]


@pytest.mark.slow
def test_a_run_recovers_from_a_kill_and_from_a_flipped_bit(tmp_path, capsys):
    names = ["--module=flame_moe", "--config=flame-moe-tiny", f"--folder={tmp_path / 'runs'}"]
    only = ["--only=process is killed", "--only=bit of the checkpoint", "--only=NaN"]
    assert run(["drill", *names, *only]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("kept" in line for line in lines) == 4  # NaN is in the names of two.
    assert sum("by hand" in line for line in lines) == 1
    assert os.listdir(tmp_path / "runs" / "02" / "checkpoints")
