"""`moelib train`: its flags, a run from them, and the same command again."""

import os

import pytest
from absl import flags
from absl.testing import flagsaver

from moelib.cli import train
from moelib.core.errors import UsageError
from tests import tiny

MODULE = """
from tests import tiny

def named_trainer_configs():
    return {"tiny": lambda: tiny.trainer_config("", max_step=2, evaler=False)}
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs the command with flags; those that it defines are taken away again."""
    (tmp_path / "named_tiny.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(*args):
        with flagsaver.flagsaver():
            train.define_flags()
            train.run(flags.FLAGS(["moelib train", *args])[1:])

    return run


def test_flags_name_a_config_where_it_writes_and_its_devices():
    with flagsaver.flagsaver():
        before = set(flags.FLAGS)
        train.define_flags()
        defined = set(flags.FLAGS) - before
    assert {"module", "config", "set", "max_step", "trainer_dir", "jax_backend"} <= defined


def test_the_same_command_again_resumes(command, tmp_path, capsys):
    args = ["--module=named_tiny", "--config=tiny", f"--trainer_dir={tmp_path}/run"]
    command(*args)
    first = tiny.losses(tmp_path / "run")
    assert list(first) == [1, 2]
    assert os.listdir(tmp_path / "run" / "checkpoints") == ["step_00000002"]
    assert "restored" not in capsys.readouterr().err
    command(*args, "--max_step=3")
    assert "restored step 2 from" in capsys.readouterr().err
    again = tiny.losses(tmp_path / "run")
    assert list(again) == [1, 2, 3]
    assert {step: again[step] for step in first} == first


def test_the_step_that_runs_is_dumped_if_asked_for(command, tmp_path):
    args = ["--module=named_tiny", "--config=tiny", f"--trainer_dir={tmp_path}/run"]
    command(*args, "--max_step=1", f"--dump={tmp_path}/dump")
    assert (tmp_path / "dump" / "report.md").read_text().startswith("# tiny on ")
    assert (tmp_path / "dump" / "hlo_optimized.txt").exists()
    assert list(tiny.losses(tmp_path / "run")) == [1]


def test_a_dump_that_cannot_be_written_is_refused(command, tmp_path):
    (tmp_path / "file").write_text("")
    args = ["--module=named_tiny", "--config=tiny", f"--trainer_dir={tmp_path}/run"]
    with pytest.raises(UsageError, match=r"--dump .*file/dump: Not a directory"):
        command(*args, f"--dump={tmp_path}/file/dump")


def test_what_is_no_flag_is_refused(command):
    with pytest.raises(UsageError, match=r"'trainer_dir' is no flag; did you mean '--trainer_dir'"):
        command("--module=named_tiny", "--config=tiny", "trainer_dir")


def test_what_to_train_and_where_must_be_said(command):
    with pytest.raises(UsageError, match="--module and --config name what to run"):
        command()
    with pytest.raises(UsageError, match="--trainer_dir says where the run writes"):
        command("--module=named_tiny", "--config=tiny")
