"""Runs in folders: those that are found, and what is told of them."""

import json

import pytest

from moelib.checkpoint.contents import CheckpointRecord, RunRecord
from moelib.core.errors import UserError
from moelib.operations.runs import list_runs, runs_table, seconds_left
from moelib.runs.curves import RunMetrics
from moelib.runs.folder import RunFolder
from moelib.runs.metrics_file import MetricsReader
from moelib.runtime.lock import directory_lock


def write_run(path, num=3, *, max_step=30, loss=2.0, config=""):
    """Writes the folder of a run with a line of metrics every ten steps."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.txt").write_text(f"max_step: {max_step}\n{config}")
    with open(path / "metrics.jsonl", "w", encoding="utf-8") as file:
        for step in range(10, 10 * num + 1, 10):
            values = {"loss": loss + 1, "tokens_per_second": 1e3 * step, "step_seconds": 2.0}
            line = {"step": step, "time": step, **values, "time/step": 0.8, "mean_loss": loss}
            file.write(json.dumps(line) + "\n")
            file.write(json.dumps({"step": step, "time": step, "val/loss": abs(step - 20)}) + "\n")
    return path


def test_runs_below_a_folder_are_described(tmp_path):
    write_run(tmp_path / "b/deep", 2)
    write_run(tmp_path / "a")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden/config.txt").touch()
    a, b = list_runs([str(tmp_path)])
    assert (a.name, a.state, a.step, a.max_step) == (str(tmp_path / "a"), "finished", 30, 30)
    assert (b.name, b.state, b.step) == (str(tmp_path / "b/deep"), "stopped", 20)
    assert (a.loss, a.rate, a.goodput) == (2.0, 30e3, None)
    assert a.validation == {"val/loss": (10, 0, 20)}
    assert runs_table([a, b]).rows[0][1:7] == [
        *("finished", "30 / 30", "2.0000", "10.0000", "0.0000 at 20", "30,000 tokens/s")
    ]


def test_a_loss_that_was_never_finite_has_no_best_value(tmp_path):
    lines = '{"step": 1, "mean_loss": 2.0}\n{"step": 1, "val/loss": null}\n'
    (write_run(tmp_path) / "metrics.jsonl").write_text(lines)
    (run,) = list_runs([str(tmp_path)])
    assert run.validation == {"val/loss": (None, None, 0)}
    assert runs_table([run]).rows[0][4:6] == ["", ""]
    json.dumps(run.validation, allow_nan=False)


@pytest.mark.parametrize(
    ("events", "state", "cause"),
    [
        ([("start", {})], "failed", "killed"),
        ([("start", {}), ("end", {"step": 30})], "finished", ""),
        ([("start", {}), ("end", {"stopped_by": "SIGTERM"})], "stopped", "SIGTERM"),
        ([("end", {"error": "NonFiniteError: step 3"})], "failed", "NonFiniteError: step 3"),
        ([("end", {"error": "x"}), ("start", {}), ("restored", {})], "failed", "killed"),
    ],
)
def test_the_log_of_events_gives_the_state(tmp_path, events, state, cause):
    write_run(tmp_path)
    for name, fields in events:
        RunFolder(tmp_path).log(name, **fields)
    (run,) = list_runs([str(tmp_path)])
    assert run.state == state
    assert cause in run.cause


def test_a_run_of_examples_that_starts_from_a_model_says_so(tmp_path):
    write_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 1.0, "examples_per_second": 7.0}\n'
    )
    RunFolder(tmp_path).log("init_from", run="models/base", step=None)
    (run,) = list_runs([str(tmp_path)])
    assert (run.rate, run.rate_unit, run.origin) == (7.0, "examples/s", "models/base")


def test_a_run_whose_only_checkpoint_lost_its_record_is_not_finished(tmp_path):
    (write_run(tmp_path) / "checkpoints/step_00000030/state").mkdir(parents=True)
    RunFolder(tmp_path).log("end", step=30)
    (run,) = list_runs([str(tmp_path)])
    assert run.state == "failed"
    assert "step_00000030 has no record/metadata" in run.cause
    CheckpointRecord.of(RunRecord(step=20), {}, {}).write(
        str(tmp_path / "checkpoints/step_00000020")
    )
    (run,) = list_runs([str(tmp_path)])
    assert run.state == "finished"  # The other checkpoint is read, with a warning.


def test_a_run_that_began_with_the_state_of_another_names_it(tmp_path):
    RunFolder(write_run(tmp_path)).log("init_from", run="runs/first", step=100, state="all")
    (run,) = list_runs([str(tmp_path)])
    assert runs_table([run]).rows[0][-1] == "runs/first, step 100"


def test_a_locked_run_is_running_and_its_remaining_time_is_estimated(tmp_path):
    write_run(tmp_path, 2)
    RunFolder(tmp_path).log("start")
    with directory_lock(str(tmp_path), setting="dir"):
        (run,) = list_runs([str(tmp_path)])
        metrics = RunMetrics(MetricsReader(tmp_path))
        metrics.update()
    assert run.state == "running"
    assert seconds_left(run, metrics) == pytest.approx(10 * 2.0 / 0.8)  # 10 steps are left.


def test_damage_and_folders_that_are_no_runs_are_named(tmp_path, caplog):
    write_run(tmp_path / "a")
    with open(tmp_path / "a/metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('nonsense\n{"step": 4')
    (tmp_path / "a/config.txt").write_bytes(b"\xff\nmax_step: 40\n")
    (tmp_path / "lost/checkpoints").mkdir(parents=True)
    (run,) = list_runs([str(tmp_path)])
    assert "skipped: 7; the last line, of 10 bytes" in runs_table([run]).footnotes[0]
    assert f"{tmp_path}/lost: no run" in caplog.text
    assert run.max_step == 40


@pytest.mark.parametrize("name", ["empty", "missing"])
def test_a_folder_without_a_run_is_an_error(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=f"{name}: (no run|there is no)"):
        list_runs([str(tmp_path / name)])


def test_runs_on_an_object_store_are_refused():
    with pytest.raises(UserError, match="'s3://bucket/runs'"):
        list_runs(["s3://bucket/runs"])
