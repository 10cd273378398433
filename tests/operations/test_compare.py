"""Runs compared: their configs, metrics at the same steps, and pictures."""

import json
import re

import pytest

from moelib.core.errors import UserError
from moelib.operations import compare
from tests.operations.test_runs import write_run


@pytest.fixture
def runs(tmp_path):
    write_run(tmp_path / "a", 4, config="model.dim: 8\nlog_every_n_steps: 1\n")
    write_run(tmp_path / "b", 3, loss=1.5, config="model.dim: 16\nmodel.new: 1\n")
    return [str(tmp_path / name) for name in "ab"]


def test_lines_that_differ_are_marked_if_they_determine_the_numbers(runs):
    assert compare.config_differences(runs) == {
        "model.dim": (True, ["8", "16"]),
        "log_every_n_steps": (False, ["1", None]),
        "model.new": (True, [None, "1"]),
    }


def test_metrics_are_compared_at_steps_that_all_runs_have(runs):
    found = compare.metrics_at_same_steps(runs, ["mean_loss", "val/loss"])
    assert found == {
        "mean_loss": {step: [2.0, 1.5] for step in (10, 20, 30)},
        "val/loss": {10: [10, 10], 20: [0, 0], 30: [10, 10]},
    }
    _, table, _ = compare.comparison_tables(runs, {}, found)
    assert table.rows[0] == ["10", "2", "1.5", "-0.5"]
    assert list(compare.metrics_at_same_steps(runs, ["loss"], 2)["loss"]) == [20, 30]


def test_long_runs_are_compared_with_few_values_in_memory_and_at_their_last_step(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        lines = (json.dumps({"step": s, "loss": s * 1.0}) + "\n" for s in range(5, 50001, 5))
        (tmp_path / name / "metrics.jsonl").write_text("".join(lines))
    values = compare.values_by_step(str(tmp_path / "a"), ["loss"])["loss"]
    assert 500 < len(values) < 1002
    found = compare.metrics_at_same_steps([str(tmp_path / x) for x in "ab"], ["loss"])["loss"]
    assert len(found) == 12
    assert found[50000] == [50000, 50000]
    assert all(values == [step, step] for step, values in found.items())


def test_a_metric_without_values_is_an_error(runs):
    with pytest.raises(UserError, match="--metrics=los: "):
        compare.metrics_at_same_steps(runs, ["los"])
    with pytest.raises(UserError, match=r"--metrics=los\)"):
        compare.plot_runs("unused.svg", runs, ["los"])


def test_a_picture_has_the_same_bytes_and_a_label_for_each_curve(runs, tmp_path):
    texts = []
    for name in ("1.svg", "2.svg"):
        compare.plot_runs(str(tmp_path / name), runs, ["mean_loss", "val/loss"])
        texts.append((tmp_path / name).read_text())
    assert texts[0] == texts[1]
    labels = re.findall(r"<!-- (\S+: \S+) -->", texts[0])
    assert labels == [f"{run}: {name}" for run in runs for name in ("mean_loss", "val/loss")]
