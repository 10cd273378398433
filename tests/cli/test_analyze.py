"""`moelib analyze`: logs, numbers, plots and reports of runs, and flags that do not fit."""

import json
import os
import shutil

import jax
import pytest

from moelib.checkpoint.policy import every_n_steps_and_last_policy
from moelib.cli import analyze, main
from moelib.core.config import config_for_function
from moelib.core.errors import UserError
from moelib.layers.transformer import LoopStack
from moelib.runs.routing_file import RoutingLog, list_logs, log_folder
from moelib.runtime.command_line import parse_flags
from moelib.train.routing_log import RoutingEvaler
from tests import tiny
from tests.analysis.runs import config, write_run, write_twins

LAYERS = ["decoder/layer0/feed_forward"]


def analyze_with(run, *args):
    """Runs the command, and returns the numbers of its files by analysis."""
    analyze.run(*parse_flags(analyze.Flags, ["routing", f"--trainer_dir={run}", *args]))
    files = sorted((run / "analysis/routing").glob("*.json"))
    return {file.stem: json.loads(file.read_text()) for file in files}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of one MoE layer with three checkpoints, and logs of two of them."""
    folder = tmp_path_factory.mktemp("run")
    decoder = tiny.stacked(tiny.transformer_layer(tiny.plain_moe()), stack=LoopStack)
    cfg = tiny.trainer_config(folder, model=tiny.model_config(decoder), save_every=1, max_step=3)
    cfg.checkpointer.keep_last_n = None
    cfg.evalers["val"].eval_policy.set(n=100)
    every_2 = config_for_function(every_n_steps_and_last_policy).set(n=2)
    log = RoutingEvaler.default_config().set(evaler="val", eval_policy=every_2)
    cfg.watchers["routing_log"] = log
    cfg.instantiate(parent=None, devices=jax.devices()[:1]).run()
    return folder


def test_checkpoints_without_a_log_get_one_that_equals_that_of_training(run, capsys):
    assert list_logs(str(run), "val") == {2: True, 3: True}
    trained = RoutingLog(log_folder(str(run), "val", 3))
    trained_ids = [ids.copy() for (ids,) in trained.layer(LAYERS[0], "expert_ids")]
    shutil.rmtree(log_folder(str(run), "val", 3))
    found = analyze_with(run)
    assert list_logs(str(run), "val") == dict.fromkeys((1, 2, 3), True)
    again = RoutingLog(log_folder(str(run), "val", 3))
    for a, (b,) in zip(trained_ids, again.layer(LAYERS[0], "expert_ids"), strict=True):
        assert (a == b).all()
    assert again.header.config_hash == trained.header.config_hash
    names = ["load", "saturation", "coactivation", "specialization", "drift", "replay"]
    assert sorted(found) == sorted(names)
    saturation = found["saturation"]["layers"][LAYERS[0]]
    assert saturation.keys() == {"1", "2"}
    assert saturation["2"][-1] == 1.0
    report = (run / "analysis/routing/report.md").read_text()
    for name in found:
        assert (run / f"analysis/routing/{name}.svg").stat().st_size > 1000
        assert f"({name}.svg)" in report
    assert "wrote" in capsys.readouterr().out


def test_folders_without_runs_and_devices_that_do_not_divide_experts_are_refused(run, tmp_path):
    with pytest.raises(UserError, match=r"--expert_parallel=3: .* experts, 4"):
        analyze_with(run, "--expert_parallel=2,3")
    with pytest.raises(UserError, match=str(tmp_path)):
        analyze_with(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["routin"], "'routin'.*'routing'"),
        (["routing", "more"], "one run"),
        (["routing", "--runs=x"], "--runs is of the analysis scaling or twins"),
        (["routing"], "--trainer_dir"),
        (["routing", "--trainer_dir=x", "--steps=last"], "--steps=last"),
        (["routing", "--trainer_dir=x", "--expert_parallel=2,0"], "--expert_parallel=2,0"),
        (["routing", "--trainer_dir=x", "--capacity_factors=a"], "--capacity_factors=a"),
        (["routing", "--trainer_dir=x", "--mesh=rows=2"], "rows"),
        (["routing", "--trainer_dir=x"], "--trainer_dir=x: there is no such folder"),
        (["routing", "--trainer_dir=x", f"--output={__file__}"], "is a file; name a folder"),
    ],
)
def test_wrong_arguments_of_routing_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        analyze.run(*parse_flags(analyze.Flags, arguments))


@pytest.fixture
def grid(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for steps in (400, 1600):
        for i, width in enumerate((16, 32, 48, 64)):
            cfg = config(width, max_step=steps * 32 // width)
            loss = 2.0 + 0.1 * (i - 1.4) ** 2 - 0.1 * (steps == 1600)
            write_run(tmp_path / f"runs/{steps}-{width}", cfg, [4.0, loss])


def test_scaling_laws_of_the_runs_below_folders_count_each_run_once(grid, tmp_path, capsys):
    arguments = ["--budgets=1e13", "--num_bootstraps=2", "--output=out", "--runs", "runs"]
    assert main.run(["analyze", "scaling", *arguments, "runs/400-16", "./runs"]) == 0
    output = capsys.readouterr().out
    assert "N_opt ~ C^a, IsoFLOP" in output
    assert "wrote out/scaling.json, out/scaling.svg, out/report.md" in output
    assert (tmp_path / "out/scaling.svg").stat().st_size > 10_000
    runs = json.loads((tmp_path / "out/scaling.json").read_text())["runs"]
    assert len({os.path.normpath(each["name"]) for each in runs}) == len(runs) > 1


def test_twins(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main.run(["analyze", "twins", *write_twins(tmp_path)]) == 0
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
        (["twins", "--budgets=1", "runs"], "--budgets is of the analysis scaling"),
        (["twins", "runs/400-16"], "1 runs; name an MoE run"),
        (["twins", "runs/none", "runs/400-16"], "runs/none/config.txt cannot be read"),
    ],
)
def test_flags_and_runs_that_do_not_fit_are_errors(grid, capsys, arguments, message):
    assert main.run(["analyze", *arguments]) == 2
    assert message in capsys.readouterr().err
