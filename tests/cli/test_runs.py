"""`moelib runs`: tables, JSON, comparisons and pictures, and flags that do not fit."""

import json

import pytest

from moelib.cli.main import run
from tests.operations.test_runs import write_run


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs/a", config="model.dim: 8\n")
    write_run(tmp_path / "runs/b", 2, config="model.dim: 16\n")


def test_runs_are_listed_as_a_table_and_as_json(runs, capsys):
    assert run(["runs"]) == 0
    output = capsys.readouterr().out
    assert "runs/a   finished   30 / 30" in output
    assert run(["runs", "--json", "runs/b"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["name"], found["validation"]) == ("runs/b", {"val/loss": [0, 0, 20]})


def test_runs_are_compared_as_tables_and_as_json(runs, capsys):
    assert run(["runs", "--compare", "runs/a", "runs/b", "--metrics=loss"]) == 0
    assert "model.dim   yes       8        16" in capsys.readouterr().out
    assert run(["runs", "--compare", "--json", "runs/a", "runs/b", "--metrics=loss"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["config"] == {"model.dim": [True, ["8", "16"]]}
    assert found["metrics"] == {"loss": {"10": [3.0, 3.0], "20": [3.0, 3.0]}}


def test_a_picture_is_written(runs, tmp_path):
    assert run(["runs", "--plot=loss.png", "runs/a"]) == 0
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compare", "runs/a"], "--compare requires two runs"),
        (["--compare", "runs/a", "runs"], "runs is no run"),
        (["--plot=x.svg"], "--plot requires a run"),
        (["--plot=x.jpg", "runs/a"], "--plot=x.jpg"),
        (["--plot=no/x.svg", "runs/a"], "the folder no does not exist"),
        (["--serve=0", "runs/a", "runs/b"], "--serve=0: name one folder"),
        (["--serve=0", "missing"], "missing: there is no such folder"),
        (["--serve_host=localhost"], "--serve_host=localhost requires"),
        (["--plot=x.svg", "--metrics=los", "runs/a"], "--metrics=los"),
    ],
)
def test_flags_that_do_not_fit_are_errors(runs, capsys, arguments, message):
    assert run(["runs", *arguments]) == 2
    assert message in capsys.readouterr().err
