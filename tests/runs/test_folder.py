"""One run per folder, and per folder of checkpoints, at a time; its events."""

import functools
import os
import shutil

import pytest

from moelib.cli.evaluate import find_steps
from moelib.core.errors import UserError
from moelib.runs.folder import CONFIG_FILE, EVENTS_FILE, RunFolder
from moelib.runs.loading import load_model
from moelib.runtime.lock import DirectoryInUseError
from moelib.runtime.lock import directory_lock as lock
from moelib.tasks.fit import fit
from tests import tiny

directory_lock = functools.partial(lock, setting="dir (--trainer_dir)")


def test_second_run_in_a_folder_is_refused_and_changes_nothing(tmp_path):
    unfinished = tmp_path / "checkpoints" / "step_00000001"
    unfinished.mkdir(parents=True)
    with (
        directory_lock(str(tmp_path)),
        pytest.raises(DirectoryInUseError, match=f"{tmp_path.name} .*process {os.getpid()} "),
    ):
        fit(tiny.trainer_config(tmp_path, max_step=1))
    assert unfinished.exists()


@pytest.mark.parametrize("checkpoints", ["shared", "other/checkpoints"])
def test_second_run_with_the_same_checkpoints_is_refused(tmp_path, checkpoints):
    cfg = tiny.trainer_config(tmp_path / "run", max_step=1)
    cfg.checkpointer.dir = str(tmp_path / checkpoints)
    with (
        directory_lock(str(tmp_path / checkpoints.removesuffix("/checkpoints"))),
        pytest.raises(DirectoryInUseError, match=r"in use .*checkpointer\.dir"),
    ):
        fit(cfg)


def test_checkpoints_inside_the_folder_of_the_run_need_no_lock_of_their_own(tmp_path):
    with RunFolder(tmp_path).locked(str(tmp_path / "checkpoints")) as checks:
        assert len(checks) == 1
    assert not checks
    with RunFolder(tmp_path).locked(str(tmp_path / "elsewhere" / "checkpoints")) as checks:
        assert len(checks) == 2


def test_a_refused_run_leaves_nothing_in_a_new_folder_and_all_in_that_of_a_run(tmp_path):
    def fail(folder, checkpoints):
        with folder.locked(checkpoints):
            folder.log("start")
            raise UserError("no data")

    def refuse(path, checkpoints=None):
        with pytest.raises(UserError, match="no data"):
            fail(RunFolder(path), checkpoints)

    refuse(tmp_path / "new", str(tmp_path / "elsewhere" / "checkpoints"))
    assert os.listdir(tmp_path) == ["elsewhere"]
    assert not (tmp_path / "elsewhere/checkpoints").exists()
    run = tmp_path / "run"
    RunFolder(run).write_config(tiny.trainer_config(run))
    refuse(run)
    assert (run / EVENTS_FILE).exists()
    (run / CONFIG_FILE).unlink()
    (run / "run.json").unlink()
    refuse(run)
    assert os.listdir(run) == []


@pytest.mark.parametrize("where", ["elsewhere", "run/own"])
def test_checkpoints_elsewhere_are_found_from_any_folder_and_inside_after_a_move(
    where, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    cfg = tiny.trainer_config("run", max_step=1, evaler=False)
    cfg.checkpointer.dir = where  # Relative to where the run is started.
    fit(cfg)
    monkeypatch.chdir("/")
    run = str(tmp_path / "run")
    assert RunFolder(run).checkpoints == str(tmp_path / where)
    assert load_model(run, require_tokenizer=False).step == 1
    assert find_steps(run, "all") == [1]
    moved = shutil.move(run, tmp_path / "moved")
    assert load_model(moved, require_tokenizer=False).step == 1


def test_events_are_read_in_their_order_and_incomplete_lines_are_not(tmp_path):
    folder = os.fspath(tmp_path)
    assert RunFolder(folder).events() == []
    RunFolder(folder).log("start", step=0)
    RunFolder(folder).log("end", step=7)
    with open(tmp_path / EVENTS_FILE, "a") as file:
        file.write('[]\n{"time": 1.0, "event": "sta')
    assert [(x["event"], x["step"]) for x in RunFolder(folder).events()] == [
        ("start", 0),
        ("end", 7),
    ]


def test_events_that_could_not_be_read_are_read_again(tmp_path, monkeypatch):
    RunFolder(tmp_path).log("bad_step", step=3)
    folder = RunFolder(tmp_path)
    with monkeypatch.context() as failing:
        failing.setattr("moelib.runtime.storage.open_to_read", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            folder.events()
    assert [x["step"] for x in folder.events()] == [3]
    folder.log("end", step=4)  # Known without reading.
    assert [x["step"] for x in folder.events()] == [3, 4]
