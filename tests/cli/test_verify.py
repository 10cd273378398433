"""`moelib verify`: its flags, its exit status, its report."""

import os

import pytest
from absl import flags
from absl.testing import flagsaver

from moelib.cli import verify
from moelib.core.errors import UsageError
from moelib.verify import Outcome, Status

TINY = ("--module=experiments.flame_moe", "--config=flame-moe-tiny")


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Returns a function that runs the command with what is found in place of the checks."""
    monkeypatch.chdir(tmp_path)

    def run(*args, found=()):
        monkeypatch.setattr("moelib.verify.verify", lambda *_: iter(found))
        with flagsaver.flagsaver():
            verify.define_flags()
            verify.run(flags.FLAGS(["moelib verify", *args])[1:])

    yield run
    for name in list(flags.FLAGS.flags_by_module_dict().get("moelib.cli.verify", [])):
        delattr(flags.FLAGS, name.name)


def test_a_config_that_passes_leaves_a_report(command, tmp_path, capsys):
    found = [
        Outcome("1 device", "compiled", Status.PASSED),
        Outcome("fsdp 8", "loss", Status.PASSED),
        Outcome("fsdp 8", "resumed", Status.PASSED),
    ]
    command(*TINY, "--meshes=fsdp=8", found=found)
    assert "| fsdp 8 | same |" in (tmp_path / "verify.md").read_text()
    assert "1 of 1 meshes: the same as on one device" in capsys.readouterr().out


def test_a_failure_exits_with_1_and_shows_both_values(command, tmp_path, capsys):
    said = "w[0] is 2 and has to be 1"
    with pytest.raises(SystemExit, match="1"):
        command(*TINY, found=[Outcome("1 device", "reached", Status.FAILED, said)])
    assert said in capsys.readouterr().out
    assert said in (tmp_path / "verify.md").read_text()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--report=/no/such/folder/x.md",), "--report /no/such/folder/x.md: there is no such"),
        (("--report=/tmp",), "--report /tmp: it is a folder"),
        (("--report=",), "--report : it is a folder"),
        (("--meshes=fdsp=8",), "--meshes: mesh 'fdsp=8': no axis 'fdsp'"),
        (("--meshes=;",), "--meshes: mesh ''"),
        (("--full_size",), "say where the data is with --data_dir"),
        (("more",), "'more' is no flag"),
    ],
)
def test_what_cannot_be_is_refused(command, args, said):
    with pytest.raises(UsageError) as error:
        command(*TINY, *args)
    assert said in str(error.value)


def test_a_report_that_cannot_be_written_is_refused_before_any_work(command, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr("moelib.launch.config_from_flags", lambda: pytest.fail("work was done"))
    with pytest.raises(UsageError, match=r"--report verify.md: it cannot be written"):
        command(*TINY)
