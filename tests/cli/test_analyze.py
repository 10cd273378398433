"""`moelib analyze`: reports of runs, and flags that do not fit."""

import pytest

from moelib.cli.main import run
from tests.analysis.runs import config, write_run, write_twins


@pytest.fixture
def grid(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for steps in (400, 1600):
        for i, width in enumerate((16, 32, 48, 64)):
            cfg = config(width, max_step=steps * 32 // width)
            loss = 2.0 + 0.1 * (i - 1.4) ** 2 - 0.1 * (steps == 1600)
            write_run(tmp_path / f"runs/{steps}-{width}", cfg, [4.0, loss])


def test_scaling_laws_of_the_runs_below_a_folder(grid, tmp_path, capsys):
    arguments = ["--budgets=1e13", "--num_bootstraps=2", "--output=out", "--runs", "runs"]
    assert run(["analyze", "scaling", *arguments]) == 0
    output = capsys.readouterr().out
    assert "N_opt ~ C^a, IsoFLOP" in output
    assert "wrote out/scaling.json, out/scaling.svg, out/report.md" in output
    assert (tmp_path / "out/scaling.svg").stat().st_size > 10_000


def test_twins(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["analyze", "twins", *write_twins(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "equal FLOPs" in output
    assert "wrote analysis/twins/twins.json" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name an analysis, not ''"),
        (["scalin", "runs"], "name an analysis, not 'scalin'"),
        (["scaling"], "no run below no folder"),
        (["scaling", "--budgets=many", "runs"], "--budgets=many"),
        (["scaling", "runs/400-16"], "1 runs for a fit"),
        (["scaling", "--metric=other", "runs"], "no line of its metrics.jsonl has 'other'"),
        (["twins", "--budgets=1", "runs"], "--budgets=1 is of the analysis scaling"),
        (["twins", "runs/400-16"], "1 runs; name an MoE run"),
        (["twins", "runs/none", "runs/400-16"], "runs/none/config.txt cannot be read"),
    ],
)
def test_flags_and_runs_that_do_not_fit_are_errors(grid, capsys, arguments, message):
    assert run(["analyze", *arguments]) == 2
    assert message in capsys.readouterr().err
