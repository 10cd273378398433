"""`moelib evaluate`: its flags, the table and the folder of the results."""

import inspect
import json

import jax
import pytest

from moelib.cli import evaluate
from moelib.core.errors import UserError
from moelib.evaluation import evaluate as evaluation
from moelib.runtime.command_line import parse_flags
from tests.train import small_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns the folder of a run of three steps, each saved."""
    folder = tmp_path_factory.mktemp("run")
    store = small_run.make_store(folder / "store")
    cfg = small_run.trainer_config(folder / "run", store, max_step=3)
    cfg.checkpointer.keep_last_n = 3
    cfg.instantiate(parent=None, devices=jax.devices()[:1]).run()
    return folder / "run"


def evaluate_with(*args):
    """Runs the command with flags."""
    evaluate.run(*parse_flags(evaluate.Flags, list(map(str, args))))


def test_results_are_shown_and_written(run, tmp_path, capsys):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("document number 7 of many")
    evaluate_with(f"--trainer_dir={run}", "--steps=1,3", f"--corpus={corpus}")
    shown = capsys.readouterr().out
    assert f"wrote results.csv, results.json, results.png in {run}/evaluation" in shown
    results = json.loads((run / "evaluation/results.json").read_text())["results"]
    assert {result["step"] for result in results} == {1, 3}
    for result in results:
        assert result["metric"] != "bits_per_byte" or f"{result['value']:.4f}" in shown
    with pytest.raises(UserError, match=f"{run}/evaluation"):
        evaluate_with(f"--trainer_dir={run}", f"--corpus={corpus}")


def test_steps_are_all_or_named(run, tmp_path):
    assert evaluate.find_steps(str(run), "all") == [1, 2, 3]
    assert evaluate.find_steps(str(run), "3,1") == [1, 3]
    with pytest.raises(UserError, match="step 4"):
        evaluate.find_steps(str(run), "1,4,7")
    with pytest.raises(UserError, match="--steps last"):
        evaluate.find_steps(str(run), "last")
    with pytest.raises(UserError, match=str(tmp_path)):
        evaluate.find_steps(str(tmp_path), "all")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--trainer_dir or --hf_dir"),
        (["--trainer_dir=x", "--hf_dir=y"], "--trainer_dir or --hf_dir"),
        (["--trainer_dir=x", "--step=1", "--steps=all"], "--step and --steps"),
        (["piqa"], "'piqa'"),
        (["--tasks="], "--tasks or --corpus"),
        (["--lm_eval", "--data_dir=x"], "--lm_eval requires --tasks"),
        (["--include_path=x"], "--include_path requires --lm_eval"),
    ],
)
def test_flags_that_do_not_fit_together_are_refused(flags, message):
    with pytest.raises(UserError, match=message):
        evaluate_with(*([] if "--tasks=" in flags else ["--tasks=piqa"]), *flags)


def test_flags_and_function_have_the_same_defaults():
    defaults = evaluate.EvaluationFlags()
    for name, parameter in inspect.signature(evaluation.evaluate_model).parameters.items():
        if hasattr(defaults, name):
            assert getattr(defaults, name) == parameter.default
