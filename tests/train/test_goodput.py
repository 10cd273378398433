"""Goodput: the account of a run's time over starts that ended, failed or were killed."""

import json

import pytest

from moelib.train.goodput import CATEGORIES, PRODUCTIVE, TimeAccount, carried_over, goodput
from moelib.train.run_log import EVENTS_FILE, read_events
from moelib.train.trainer import SpmdTrainer
from tests import tiny


def record(time, step, productive, event="line", **lost):
    seconds = {f"time_lost/{name}": lost.get(name, 0.0) for name in CATEGORIES}
    return {"event": event, "time": time, "step": step, PRODUCTIVE: productive, **seconds}


START = {"event": "start", "time": 100.0}


def test_time_of_a_killed_start_is_divided_into_kept_steps_wasted_steps_and_waiting():
    lines = [
        record(115.0, 10, 10.0, program_startup=5.0),
        record(127.0, 20, 20.0, program_startup=5.0, checkpoint_save=2.0),
    ]
    spent = carried_over([START, record(105, 1, 0, "compiled")], lines, 15, 150.0)
    assert spent[PRODUCTIVE] == 15.0
    assert spent["time_lost/wasted_progress"] == 5.0
    assert spent["time_lost/program_startup"] == 5.0
    assert spent["time_lost/infrastructure_recovery"] == 150 - 127
    assert sum(spent.values()) == 150 - 100


def test_a_run_that_ended_loses_nothing_but_the_time_until_its_next_start():
    spent = carried_over([START, record(140.0, 20, 40.0, "end")], [record(115, 10, 15)], 20, 160.0)
    assert spent[PRODUCTIVE] == 40.0
    assert spent["time_lost/wasted_progress"] == 0.0
    assert spent["time_lost/infrastructure_recovery"] == 20.0


def test_steps_taken_twice_and_lost_again_are_wasted_twice():
    first = [record(110.0, 10, 10.0)]
    spent = carried_over([START], first, 8, 110.0)
    events = [START, {**spent, "event": "restored", "time": 110.0, "step": 8}]
    kept = [record(108.0, 8, 8.0)]
    second = record(113.0, 11, 11.0, wasted_progress=2.0)
    spent = carried_over(events, [*kept, second], 8, 113.0)
    assert spent[PRODUCTIVE] == 8.0
    assert spent["time_lost/wasted_progress"] == 5.0


def test_steps_of_a_start_that_began_between_log_lines_are_interpolated():
    spent = carried_over([START], [record(120.0, 10, 20.0)], 5, 120.0)
    assert (spent[PRODUCTIVE], spent["time_lost/wasted_progress"]) == (10.0, 10.0)


def test_the_first_start_carries_nothing_over():
    spent = carried_over([START], [], 0, 100.0)
    assert set(spent.values()) == {0.0}
    assert goodput([START]) == {}


def test_the_newest_record_counts():
    found = goodput([record(120, 10, 10, "end")], [record(130, 20, 30, program_startup=10)])
    assert (found["goodput"], found[PRODUCTIVE]) == (0.75, 30)


def test_incomplete_lines_and_lines_without_a_record_are_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = record(1.0, 4, 2.0)
    path.write_text('{"step": 1, "val/loss": 1}\n' + json.dumps(whole) + "\n" + '{"step": 8, "ti')
    account = TimeAccount(str(tmp_path), str(path))
    account.start()
    account.resume(4, 0.0)
    assert account.metrics({})[PRODUCTIVE] == 2.0


def test_a_log_that_cannot_be_written_does_not_end_a_run(tmp_path, caplog):
    account = TimeAccount(str(tmp_path / "missing"), str(tmp_path / "metrics.jsonl"))
    account.start()
    account.resume(0, 0.0)
    assert "NO EVENT 'start'" in caplog.text


def failing_at(directory, step, **fields):
    """Runs a trainer whose data fail before a step."""
    trainer = tiny.trainer_config(directory, evaler=False, **fields).instantiate(parent=None)
    run_step = trainer.run_step

    def fail(batch, **options):
        if trainer.step + 1 == step:
            raise OSError("gone")
        return run_step(batch, **options)

    trainer.run_step = fail
    with pytest.raises(OSError, match="gone"):
        trainer.run()


@pytest.mark.parametrize("is_killed", [False, True])
def test_all_time_since_the_first_start_is_accounted_for(tmp_path, capsys, is_killed):
    failing_at(tmp_path, 8)
    log = tmp_path / EVENTS_FILE
    *others, end = log.read_text().splitlines(keepends=True)
    assert json.loads(end)["error"] == "OSError: gone"
    if is_killed:
        log.write_text("".join(others))
    tiny.trainer_config(tmp_path, evaler=False).instantiate(parent=None).run()
    events = read_events(str(tmp_path))
    kinds = ["start", "restored", "compiled"]
    assert [x["event"] for x in events] == [*kinds, *["end"] * (not is_killed), *kinds, "end"]
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
