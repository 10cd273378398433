"""`moelib verify`: its flags, its exit status, its report."""

import os

import pytest

from moelib.cli import verify
from moelib.core.errors import UserError
from moelib.runtime.command_line import parse_flags
from moelib.verify.outcome import Outcome, Status

TINY = ("--module=experiments.flame_moe", "--config=flame-moe-tiny")


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Returns a function that runs the command, with given outcomes instead of checks."""
    monkeypatch.chdir(tmp_path)

    def run(*args, found=()):
        monkeypatch.setattr("moelib.verify.run.run_checks", lambda *_, **__: iter(found))
        verify.run(*parse_flags(verify.Flags, args))

    return run


def test_a_config_that_passes_leaves_a_report(command, tmp_path, capsys):
    found = [
        Outcome("1 device", "compiled", Status.PASSED),
        Outcome("fsdp=8", "loss", Status.PASSED),
        Outcome("fsdp=8", "resumed", Status.PASSED),
    ]
    command(*TINY, "--meshes=fsdp=8", found=found)
    assert "| fsdp=8 | same |" in (tmp_path / "verify.md").read_text()
    assert "1 of 1 meshes: same" in capsys.readouterr().out


def test_a_failure_exits_with_1_and_shows_both_values(command, tmp_path, capsys):
    detail = "w[0] is 2, expected 1"
    with pytest.raises(SystemExit, match="1"):
        command(*TINY, found=[Outcome("1 device", "reached", Status.FAILED, detail)])
    assert detail in capsys.readouterr().out
    assert detail in (tmp_path / "verify.md").read_text()


def test_ctrl_c_leaves_a_report_of_the_checks_so_far(command, tmp_path):
    def interrupted():
        yield Outcome("1 device", "built", Status.PASSED)
        raise KeyboardInterrupt

    with pytest.raises(SystemExit, match="1"):
        command(*TINY, "--meshes=fsdp=8", found=interrupted())
    assert "| built | passed |" in (tmp_path / "verify.md").read_text()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--report=/no/such/folder/x.md",), "--report=/no/such/folder/x.md"),
        (("--report=/tmp",), "--report=/tmp"),
        (("--report=",), "--report"),
        (("--meshes=fdsp=8",), r"'fdsp'.*'fsdp'"),
        (("--meshes=;",), "mesh ''"),
        (("--devices=9",), "num_devices=9"),
        (("--full_size",), "--data_dir"),
        (("more",), "'more'"),
    ],
)
def test_impossible_arguments_are_refused(command, args, message):
    with pytest.raises(UserError, match=message):
        command(*TINY, *args)


def test_a_report_that_cannot_be_written_is_refused_before_any_work(command, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr("moelib.launch.load_config", lambda *_, **__: pytest.fail("work was done"))
    with pytest.raises(UserError, match="--report=verify"):
        command(*TINY)
