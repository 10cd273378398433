"""The page on the Python API: each region is quoted there, and runs here."""

import inspect
import json
import pathlib
import re

import pytest

import moelib
from docs.generate import ROOT
from moelib.core.errors import UserError
from moelib.evaluation.report import Result
from moelib.inference.generate import Completion
from moelib.launch import load_config
from moelib.planning.report.step_report import StepReport
from moelib.runs.loading import LoadedModel
from moelib.runtime.table import print_table
from moelib.tasks.fit import FitResult
from moelib.verify.report import Report
from tests.docs import metric_names
from tests.evaluation import folders

RESULTS = FitResult, LoadedModel, Completion, Result
FUNCTIONS = sorted({*moelib.__all__} - {"__version__", "Task"})
PAGE = (ROOT / "docs/python_api.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_on_the_page_and_its_docstring_has_every_argument(name):
    function = getattr(moelib, name)
    anchor = f"{function.__module__}.{name}"
    assert f"[`{name}`](reference/{anchor.split('.')[1]}.md#{anchor})" in PAGE
    documented = set(re.findall(r"^ +\**(\w+): ", inspect.getdoc(function) or "", re.MULTILINE))
    assert {*inspect.signature(function).parameters} <= documented


@pytest.mark.parametrize("result", RESULTS, ids=lambda each: each.__name__)
def test_results_are_on_the_page(result):
    anchor = f"{result.__module__}.{result.__name__}"
    assert f"[`{result.__name__}`](reference/{anchor.split('.')[1]}.md#{anchor})" in PAGE


def test_config():
    # --8<-- [start:config]
    cfg = load_config("experiments.flame_moe", "flame-moe-tiny", data_dir="data", max_step=100)
    cfg.input.global_batch_size = 16
    # --8<-- [end:config]
    assert (cfg.max_step, cfg.input.global_batch_size) == (100, 16)


def test_generate(trainer_dir, capsys):
    model = moelib.load_model(trainer_dir)
    for completion in moelib.generate(model, ["document number"], max_new_tokens=8, seed=1):
        print(completion.text, completion.tokens)
    assert capsys.readouterr().out.endswith("]\n")


def test_evaluate(trainer_dir, capsys):
    corpus = str(folders.DATA / "corpus.jsonl")
    # --8<-- [start:evaluate]
    model = moelib.load_model(trainer_dir)
    for result in moelib.evaluate(model, corpus=[corpus], limit=2):
        print(result.step, result.task, result.metric, result.value)
    # --8<-- [end:evaluate]
    assert "bits_per_byte" in capsys.readouterr().out


def test_plan(trainer_config, capsys):
    cfg = trainer_config
    # --8<-- [start:plan]
    plan = moelib.plan(cfg, ["v6e:2x2", "h100:1x8"], tokens=1e9)
    print_table(plan.table(max_rows=3))
    best = plan.rows[0]
    print(best.candidate.mesh, best.seconds, best.mfu, best.fits)
    # --8<-- [end:plan]
    assert capsys.readouterr().out.endswith("True\n")


def test_representations_are_short_and_say_what_differs(trainer_config, trainer_dir):
    result = moelib.fit(trainer_config, trainer_dir=trainer_dir)
    model = moelib.load_model(trainer_dir)
    trainer = trainer_config.clone(dir=trainer_dir).instantiate(parent=None)
    shown = {
        "FitResult": result,
        "LoadedModel": model,
        "CausalLM": model.model,
        "SpmdTrainer": trainer,
        "SpmdTrainer.Config": trainer_config,
        "Plan": moelib.plan(trainer_config, ["v6e:2x2"]),
        "Trace": moelib.trace(model, "document number"),
        "Completion": next(moelib.generate(model, ["document"], max_new_tokens=4)),
        "Report": Report("small", 8, [], ["fsdp=8"]),
        "StepReport": StepReport("small", "v6e:2x2", {"fsdp": 4}, {}),
    }
    for name, value in shown.items():
        assert re.match(rf"{re.escape(name)}\([^\n]{{10,1000}}\)$", repr(value)), repr(value)
    assert f"step=2, validation/loss={result.evaluations['validation']['loss']:.4f}" in repr(result)
    assert "global_batch_size=8" in repr(trainer_config)
    assert "watchdog_timeout_seconds" not in repr(trainer_config)


def test_a_result_is_plotted(trainer_config, trainer_dir):
    result = moelib.fit(trainer_config, trainer_dir=trainer_dir)
    (losses,) = result.plot().axes
    assert [line.get_label() for line in losses.lines] == ["mean_loss", "validation/loss"]
    assert losses.lines[1].get_ydata()[-1] == result.evaluations["validation"]["loss"]
    assert result.plot("gradient_norm")._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="nothing"):
        result.plot("nothing")


def test_every_metric_of_a_run_is_on_the_page(trainer_dir):
    known = re.compile("|".join(map(metric_names.pattern, metric_names.NAMES)))
    found = set()
    for line in (pathlib.Path(trainer_dir) / "metrics.jsonl").read_text().splitlines():
        found |= json.loads(line).keys()
    names = {name.removeprefix("validation/") for name in found}
    assert {"cross_entropy", "validation/perplexity", "skipped"} <= found
    assert {name for name in names if not known.fullmatch(name)} == set()
