"""Goodput: the account of a run's time over starts that ended, failed or were killed."""

import json

import pytest

from moelib.runs.folder import EVENTS_FILE, RunFolder
from moelib.runs.goodput import CATEGORIES, PRODUCTIVE, carried_over, goodput
from moelib.train.loop import TrainLoop
from moelib.train.signals import StopRequest
from moelib.train.start import Start
from moelib.train.trainer import SpmdTrainer
from tests import tiny


def record(time, step, productive, event="line", **lost):
    seconds = {f"time_lost/{name}": lost.get(name, 0.0) for name in CATEGORIES}
    return {"event": event, "time": time, "step": step, PRODUCTIVE: productive, **seconds}


START = {"event": "start", "time": 100.0}


@pytest.mark.parametrize(
    ("events", "lines", "step", "now", "productive", "wasted", "waiting"),
    [
        ([], [], 0, 100, 0, 0, 0),  # The first start.
        ([record(140, 20, 40, "end")], [record(115, 10, 15)], 20, 160, 40, 0, 20),
        (  # Killed after its last line.
            [record(105, 1, 0, "compiled")],
            [
                record(115, 10, 10, program_startup=5),
                record(127, 20, 20, program_startup=5, checkpoint_save=2),
            ],
            *(15, 150, 15, 5, 23),
        ),
        ([], [record(120, 10, 20)], 5, 120, 10, 10, 0),  # Begins between two lines.
        (  # Steps that are taken twice and lost again are wasted twice.
            [record(110, 8, 8, "restored", wasted_progress=2)],
            [record(108, 8, 8), record(113, 11, 11, wasted_progress=2)],
            *(8, 113, 8, 5, 0),
        ),
    ],
)
def test_time_of_earlier_starts_was_productive_wasted_or_spent_waiting(
    events, lines, step, now, productive, wasted, waiting
):
    spent = carried_over([START, *events], lines, step, now)
    assert spent[PRODUCTIVE] == productive
    assert spent["time_lost/wasted_progress"] == wasted
    assert spent["time_lost/infrastructure_recovery"] == waiting
    assert sum(spent.values()) == now - START["time"]


def test_the_newest_record_counts():
    found = goodput([record(120, 10, 10, "end")], [record(130, 20, 30, program_startup=10)])
    assert (found["goodput"], found[PRODUCTIVE]) == (0.75, 30)
    assert goodput([START]) == {}


def test_incomplete_lines_and_lines_without_a_record_are_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = record(1.0, 4, 2.0)
    path.write_text('{"step": 1, "val/loss": 1}\n' + json.dumps(whole) + "\n" + '{"step": 8, "ti')
    cfg = tiny.trainer_config(tmp_path, evaler=False)
    trainer = cfg.clone().instantiate(parent=None)
    account = trainer.watchers["goodput"]
    TrainLoop(trainer, Start(step=4), stop=StopRequest())
    account.started()
    assert account.metrics()[PRODUCTIVE] == 2.0


def test_a_log_that_cannot_be_written_does_not_end_a_run(tmp_path, caplog):
    RunFolder(tmp_path / "missing").note("start")
    assert "NO EVENT 'start'" in caplog.text


def test_all_time_since_the_first_start_of_a_killed_run_is_accounted_for(tmp_path, capsys):
    trainer = tiny.trainer_config(tmp_path, evaler=False).instantiate(parent=None)

    def fail(_):
        if trainer.step == 7:
            raise OSError("gone")

    tiny.after_each_step(trainer, fail)
    with pytest.raises(OSError, match="gone"):
        trainer.run()
    log = tmp_path / EVENTS_FILE
    *others, end = log.read_text().splitlines(keepends=True)
    assert json.loads(end)["error"] == "OSError: gone"
    log.write_text("".join(others))
    tiny.trainer_config(tmp_path, evaler=False).instantiate(parent=None).run()
    events = RunFolder(tmp_path).events()
    kinds = ["start", "restored", "compiled"]
    assert [x["event"] for x in events] == [*kinds, *kinds, "end"]
    found = goodput(events)
    total = found.pop("goodput"), sum(found.values())
    assert total[1] == pytest.approx(events[-1]["time"] - events[0]["time"], abs=0.1)
    assert 0 < total[0] < 1
    wasted = ("wasted_progress", "compilation")
    for name in (*wasted, "program_startup", "checkpoint_restore", "checkpoint_save"):
        assert found[f"time_lost/{name}"] > 0, name
    compiled = [x["seconds"] for x in events if x["event"] == "compiled"]
    assert found["time_lost/compilation"] == pytest.approx(sum(compiled), abs=1e-2)
    restored = events[-3]
    assert restored["step"] == 4
    lines = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    kept = {line["step"]: line[PRODUCTIVE] for line in lines}
    assert restored[PRODUCTIVE] == pytest.approx(kept[4], abs=1e-3)
    assert "goodput" in capsys.readouterr().out
    assert lines[-1]["time_lost/wasted_progress"] == pytest.approx(
        restored["time_lost/wasted_progress"], abs=1e-3
    )


def test_steps_at_risk_are_those_since_the_newest_complete_checkpoint(tmp_path):
    cfg = tiny.trainer_config(tmp_path, evaler=False, max_step=5, save_every=2)
    cfg.checkpointer.wait = "after_save"
    trainer: SpmdTrainer = cfg.instantiate(parent=None)
    assert trainer.checkpointer.complete_step == 0
    trainer.run()
    assert trainer.checkpointer.complete_step == 5
    lines = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["checkpoint/steps_at_risk"] for line in lines] == [1, 2, 1, 2, 1]
    blocking = [line["checkpoint/blocking_seconds"] for line in lines]
    assert blocking[:2] == [0, 0]
    assert min(blocking[2:]) > 0
