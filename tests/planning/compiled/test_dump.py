"""Dumps of a small step, of one chip of a TPU and of the CPU."""

import json
import re

import jax
import pytest

from moelib.core.errors import UserError
from moelib.planning.compiled.dump import dump_when_compiled, write_report
from moelib.planning.report.step_report import StepReport
from moelib.planning.report.tables import finding_lines, memory_by_content, report_text
from tests import tiny
from tests.planning.report.test_step_report import FINDING, make_report


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
    """Returns the folder that a run left."""
    folder = tmp_path_factory.mktemp("run")
    cfg = tiny.trainer_config(folder / "run", mesh_shape=(1, 1, 1, 2, 1, 1), evaler=False)
    trainer = cfg.instantiate(parent=None, devices=jax.devices()[:2])
    dump_when_compiled(trainer, str(folder / "new" / "dump"), name="tiny")
    trainer.compile_train_step()
    return folder / "new" / "dump"


@pytest.fixture(scope="module")
def report(dumped):
    return StepReport.from_json(json.loads((dumped / "report.json").read_text()))


def test_all_stages_of_the_step_are_written_and_measured(dumped, report):
    assert "lambda" in (dumped / "jaxpr.txt").read_text()
    assert "stablehlo." in (dumped / "stablehlo.txt").read_text()
    for name in ("hlo_before.txt", "hlo_optimized.txt"):
        assert (dumped / name).read_text().startswith("HloModule jit_train_step")
    names = [stage["name"] for stage in report.stages]
    assert names == ["jaxpr", "StableHLO", "HLO, before", "HLO, optimized"]
    for stage, name in zip(report.stages, ("jaxpr", "stablehlo"), strict=False):
        assert stage["lines"] == len((dumped / f"{name}.txt").read_text().splitlines())
    assert report.stages[2]["instructions"] > 100
    assert report.stages[2]["fusions"] == 0
    assert report.stages[3]["fusions"] == report.figures["fusions"] > 0
    assert sum(row["count"] for row in report.fusions) == report.figures["fusions"]


def test_memory_is_split_by_content(report):
    shares, figures = memory_by_content(report), report.figures
    parameters = 2 * 32 * 16 * 4 // 2 + 2 * 4  # A table and a head, split in two; two counts.
    assert shares["parameters"] == parameters
    assert (
        shares["parameters"] + shares["learner's state"] + shares["other arguments"]
        == (figures["memory.arguments"])
    )
    assert figures["memory.peak"] >= figures["memory.arguments"] + shares["temporaries"]


def test_flops_are_set_against_the_models_own(report):
    tokens = 8 * 16 // 2
    assert report.figures["model_flops"] == tokens * 6 * 16 * 32
    # The embedding is a gather: one matmul, forward, and two backward.
    assert report.figures["executed_over_model_flops"] == pytest.approx(1.0, rel=0.1)


def test_the_report_can_be_read(dumped):
    text = (dumped / "report.md").read_text()
    assert text.startswith("# tiny on 2 x cpu")
    titles = ["Findings", "Figures", "Stages", "Memory", "Fusions", "Collectives"]
    assert all(f"\n## {title}" in text for title in titles)
    assert "![memory](memory.png)" in text
    assert (dumped / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert "does not estimate cycles" in text
    assert not (dumped / "time.png").exists()
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({line.count("|") for line in table.splitlines()}) == 1


def test_time_is_plotted_where_there_is_an_estimate(tmp_path):
    cycles = [
        {"kind": "matmul", "phase": phase, "cycles": amount}
        for phase, amount in (("forward", 3_000_000), ("backward", 6_000_000))
    ]
    path = write_report(tmp_path, make_report(cycles=cycles))
    assert "| matmul | 3.00 | 0.00 | 6.00 | 0.00 | 0.00 | 9.00 |" in path.read_text()
    assert (tmp_path / "time.png").read_bytes().startswith(b"\x89PNG")


def test_findings_name_the_rule_the_instruction_and_advice():
    assert finding_lines(FINDING) == [
        "hint: padding: model.decoder",
        "fusion.1 f32[2048,4] and 2 more: 1.0 MiB, 8 times per step",
        "join dimensions",
        "made at layers/norm.py:35",
    ]
    text = report_text(make_report(findings=(FINDING,)), {})
    assert "- **padding** (hint): `model.decoder`\n  fusion.1" in text
    assert "## Findings\n\nNone." in report_text(make_report(), {})


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_compiled(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/dump: Not"):
        dump_when_compiled(None, str(tmp_path / "file" / "dump"), name="tiny")
