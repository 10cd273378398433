"""`moelib train`: its flags, a run from them, and the same command again."""

import os

import pytest

from moelib.cli import train
from moelib.core.errors import UsageError, UserError
from moelib.runtime.command_line import parse_flags
from tests import tiny

MODULE = """
from tests import tiny

def named_trainer_configs():
    return {"tiny": lambda: tiny.trainer_config("", max_step=2, evaler=False)}
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs the command with flags."""
    (tmp_path / "named_tiny.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    return lambda *args: train.run(*parse_flags(train.Flags, args))


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


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        (
            ["--trainer_dir=run", "--dump=named_tiny.py/dump"],
            UserError,
            r"named_tiny\.py/dump: Not",
        ),
        (["trainer_dir"], UsageError, "'trainer_dir'.*'--trainer_dir'"),
        (["--config="], UsageError, "--module and --config"),
        ([], UsageError, "--trainer_dir"),
    ],
)
def test_wrong_flags_are_refused(command, args, error, message):
    with pytest.raises(error, match=message):
        command("--module=named_tiny", "--config=tiny", *args)
