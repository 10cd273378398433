"""The loop: its overhead, the order of its work, and the losses that it shows."""

import collections
import json
import math
import os
import signal
import sys
import types

import jax
import numpy as np
import pytest

from moelib.train.interval import LogInterval
from moelib.train.loop import TrainLoop
from moelib.train.metrics import pack, unpack
from moelib.train.signals import StopRequest
from moelib.train.start import Start
from moelib.train.watcher import Activity, Watcher
from tests import tiny


def evaluations(directory):
    with open(directory / "metrics.jsonl", encoding="utf-8") as lines:
        values = [json.loads(line) for line in lines]
    return [(value["step"], value["val/loss"]) for value in values if "val/loss" in value]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The evaluations of a run that is not stopped."""
    folder = tmp_path_factory.mktemp("unbroken")
    tiny.trainer_config(folder).instantiate(parent=None).run()
    found = evaluations(folder)
    assert [step for step, _ in found] == [4, 8]
    return found


def test_host_work_per_step_is_small_and_does_not_grow_with_the_metrics(tmp_path, monkeypatch):
    cfg = tiny.trainer_config(tmp_path, max_step=30, evaler=False)
    cfg.set(log_every_n_steps=100, checkpointer=None)
    trainer = cfg.instantiate(parent=None)
    trainer.init()
    names = ["non_finite", "num_tokens", "loss", *(f"m{i}" for i in range(100))]
    metrics = jax.device_put(
        pack(dict.fromkeys(names, np.float32(0))),
        jax.sharding.NamedSharding(trainer.mesh(), jax.sharding.PartitionSpec()),
    )
    trainer._compiled = lambda state, batch: (state, metrics)  # A step that takes no time.
    calls, run_step = collections.Counter(), trainer.run_step

    def counted(batch, *, input_state=None):
        sys.setprofile(lambda frame, event, arg: calls.update({trainer.step: event == "call"}))
        return run_step(batch, input_state=input_state)

    monkeypatch.setattr(trainer, "run_step", counted)
    monkeypatch.setattr(TrainLoop, "_next_batch", lambda self, feed: {})
    try:
        with jax.set_mesh(trainer.mesh()):
            TrainLoop(trainer, Start(), stop=StopRequest()).run()
    finally:
        sys.setprofile(None)
    assert np.median([calls[step] for step in range(5, 25)]) < 50  # Python calls.


def test_each_step_is_checked_while_the_next_one_runs(tmp_path, monkeypatch):
    cfg = tiny.trainer_config(tmp_path, max_step=4, evaler=False).set(checkpointer=None)
    trainer = cfg.instantiate(parent=None)
    order, check = [], TrainLoop.wait

    def checked(self):
        if self._pending is not None:
            order.append(f"check {self.step}")
        check(self)

    tiny.after_each_step(trainer, lambda _: order.append(f"step {trainer.step}"))
    monkeypatch.setattr(TrainLoop, "wait", checked)
    trainer.run()
    assert order == [
        "step 1", "step 2", "check 1", "step 3", "check 2", "step 4", "check 3", "check 4",
    ]  # fmt: skip


def test_an_error_of_the_input_is_raised_and_the_run_closed(tmp_path, monkeypatch):
    cfg = tiny.trainer_config(tmp_path)
    trainer = cfg.instantiate(parent=None)
    monkeypatch.setattr(
        type(trainer.input), "batch", lambda *args: (_ for _ in ()).throw(OSError("gone"))
    )
    with pytest.raises(OSError, match="gone"):
        trainer.run()


def test_the_watchdog_knows_that_the_loop_waits_for_data(tmp_path, monkeypatch):
    causes = []

    class Watched(Activity):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name == "cause":
                causes.append(value)

    monkeypatch.setattr("moelib.train.loop.Activity", Watched)
    seen, batch_of = [], type(tiny.input_config().instantiate()).batch
    trainer = tiny.trainer_config(tmp_path, max_step=2, evaler=False).instantiate(parent=None)
    trainer.input.reads_parameters = True  # Batches are made while the loop waits.

    def batch(*args):
        seen.append(causes[-1])
        return batch_of(*args)

    monkeypatch.setattr(type(trainer.input), "batch", batch)
    trainer.run()
    assert set(seen) == {", as the input of this process has no batch"}
    assert causes[-1] == ""


def test_changed_data_of_an_evaluation_are_a_warning(tmp_path, caplog):
    cfg = tiny.trainer_config(tmp_path, max_step=1, save_every=1)
    cfg.clone().instantiate(parent=None).run()
    cfg.clone(max_step=2).instantiate(parent=None).run()
    assert "has changed" not in caplog.text
    cfg.evalers["val"].input.source.num_documents += 1
    cfg.set(max_step=3).instantiate(parent=None).run()
    assert "evalers.val.input has changed: source was" in caplog.text


def test_stop_precedes_an_evaluation_which_the_resumed_run_makes_up_for(
    expected, tmp_path, monkeypatch
):
    trainer = tiny.trainer_config(tmp_path).instantiate(parent=None)
    with monkeypatch.context() as patch:
        patch.setattr(StopRequest, "requested", lambda self: trainer.step == 4)
        patch.setattr(trainer.evalers["val"], "evaluate", lambda *a, **k: pytest.fail("evaluated"))
        assert trainer.run()["step"] == 4
    assert os.listdir(tmp_path / "checkpoints") == ["step_00000004"]
    cfg = tiny.trainer_config(tmp_path)
    cfg.checkpointer.set(keep_last_n=1, keep_best_n=1, best_metric="val/loss", best_mode="max")
    trainer = cfg.instantiate(parent=None)
    trainer.run()
    assert evaluations(tmp_path) == expected
    assert expected[0][1] > expected[1][1]
    assert trainer.best_step() == 4
    assert trainer.folder.record(4).metrics["val/loss"] == expected[0][1]


@pytest.mark.parametrize(("max_step", "interval"), [(4, 3), (2, 1)])
def test_log_lines_and_the_final_table_show_the_mean_loss_of_an_interval(
    tmp_path, capsys, max_step, interval
):
    cfg = tiny.trainer_config(tmp_path, max_step=max_step, evaler=False).set(checkpointer=None)
    every = {}
    trainer = cfg.set(log_every_n_steps=interval).instantiate(parent=None)
    tiny.after_each_step(trainer, lambda packed: every.update({trainer.step: unpack(packed)}))
    assert trainer.run()["loss"] == every[max_step]["loss"]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    logged = {line["step"]: line for line in map(json.loads, lines)}
    shown = capsys.readouterr()
    assert list(logged) == sorted({*range(interval, max_step, interval), max_step})
    for step, line in logged.items():
        steps = [every[n] for n in range(max(step - interval, 0) + 1, step + 1)]
        tokens = [found["num_tokens"] for found in steps]
        mean = np.average([found["loss"] for found in steps], weights=tokens)
        assert line["mean_loss"] == pytest.approx(mean)
        assert line["loss"] == every[step]["loss"]
        label = f"  (mean of {interval} steps)" if interval > 1 else "  lr"
        assert f"step {step}/{max_step}  loss {mean:.4f}{label}" in shown.err
    label = f" (mean of the last {interval} steps)" if interval > 1 else ""
    assert f"{mean:.4f}{label}" in shown.out


def test_a_step_without_tokens_does_not_spoil_the_mean_loss():
    throughput = types.SimpleNamespace(step_done=lambda *_: None)
    fields = {"num_steps": 3, "num_slots": 8, "num_examples": None, "is_language_model": True}
    interval = LogInterval(throughput, None, None, **fields)
    for tokens, loss in ((1.0, 2.0), (0.0, math.nan), (3.0, 4.0)):
        interval.step_done({"num_tokens": tokens, "loss": loss, "cross_entropy": loss / 2})
    assert interval.mean_losses() == (3.5, 1.75)


def test_a_signal_ends_an_evaluation_which_the_resumed_run_begins_again(
    expected, tmp_path, monkeypatch
):
    cfg = tiny.trainer_config(tmp_path)
    cfg.checkpointer.save_policy.n = 100
    trainer, batches = cfg.instantiate(parent=None), []
    after_batch = TrainLoop.on_batch

    def signalled(self, number):
        batches.append(number)
        os.kill(os.getpid(), signal.SIGTERM)
        after_batch(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(TrainLoop, "on_batch", signalled)
        result = trainer.run()
    assert (result["step"], result["stopped_by"], batches) == (4, "SIGTERM", [0])
    assert evaluations(tmp_path) == []
    cfg.instantiate(parent=None).run()
    assert evaluations(tmp_path) == expected


class BetweenSteps(Watcher):
    """Works between steps, and records them."""

    def prepare(self, trainer):
        self.steps = []

    def between_steps(self, step):
        self.steps.append(step)
        self.run.on_batch(0)


def test_work_that_a_signal_ends_does_not_keep_a_step_from_other_watchers(tmp_path, monkeypatch):
    cfg = tiny.trainer_config(tmp_path, evaler=False).set(checkpointer=None)
    cfg.watchers = {name: BetweenSteps.default_config() for name in ("a", "b")}
    trainer = cfg.instantiate(parent=None)
    monkeypatch.setattr(StopRequest, "requested", lambda self: trainer.step == 2)
    trainer.run()
    assert [trainer.watchers[name].steps for name in ("a", "b")] == [[1, 2], [1, 2]]


def test_a_signal_in_the_evaluation_of_a_restored_state_takes_no_step(tmp_path, monkeypatch):
    cfg = tiny.trainer_config(tmp_path)
    for _ in range(2):
        trainer = cfg.instantiate(parent=None)
        monkeypatch.setattr(StopRequest, "requested", lambda self, t=trainer: t.step == 4)
        assert trainer.run()["step"] == 4
    assert evaluations(tmp_path) == []


def test_the_watchdog_runs_from_the_first_compiled_step_on(tmp_path, monkeypatch):
    beats, compiled = [], []

    monkeypatch.setattr(Activity, "beat", lambda _, step: beats.append((step, len(compiled))))
    trainer = tiny.trainer_config(tmp_path, max_step=2).instantiate(parent=None)

    def step(packed):
        assert bool(beats) == bool(compiled)  # Compiling may take longer than any step.
        compiled.append(packed)

    tiny.after_each_step(trainer, step)
    trainer.run()
    assert beats[0] == (0, 1)
    assert beats[-1][0] == 2
