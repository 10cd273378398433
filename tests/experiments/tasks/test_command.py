"""Every example is a command, whose flags are the arguments of its function `run`."""

import pathlib
import sys

import pytest

from benchmarks.task_lines import PARADIGMS
from experiments.tasks import command


def call(monkeypatch, run, *arguments):
    monkeypatch.setattr(sys, "argv", ["example.py", *arguments])
    command.run_as_command(run, "An example.")


def test_arguments_are_flags(monkeypatch, capsys):
    def run(trainer_dir, *, base=None, max_step=400, mesh="data=-1"):
        return trainer_dir, base, max_step, mesh

    call(monkeypatch, run, "--trainer_dir=runs/a", "--base=b", "--max_step=3")
    assert capsys.readouterr().out == "('runs/a', 'b', 3, 'data=-1')\n"
    call(monkeypatch, run, "--trainer_dir=runs/a")
    assert capsys.readouterr().out == "('runs/a', None, 400, 'data=-1')\n"
    with pytest.raises(SystemExit):
        call(monkeypatch, run)
    assert "--trainer_dir" in capsys.readouterr().err


def test_every_example_has_this_command():
    folder = pathlib.Path(command.__file__).parent
    files = {name for names, _ in PARADIGMS.values() for name in names} - {"command"}
    for name in files:
        assert "    run_as_command(run, __doc__)" in (folder / f"{name}.py").read_text(), name
