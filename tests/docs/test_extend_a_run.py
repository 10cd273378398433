"""docs/extend_a_run.md: a watcher of one's own."""

import json
from unittest import mock

import pytest

from moelib.core.config import config_class
from moelib.core.errors import UserError
from moelib.core.metrics import Scalars
from moelib.runs.folder import RunFolder
from moelib.runtime.command_line import one_line
from moelib.train.watcher import GoBack, Watcher
from tests import tiny


# --8<-- [start:watcher]
class StopWhenWorse(Watcher):
    """Stops a run once a metric of an evaluation has not improved for some evaluations."""

    @config_class
    class Config(Watcher.Config):
        metric: str = "val/loss"
        patience: int = 2  # Evaluations.

    def started(self) -> None:
        self.best, self.since = float("inf"), 0

    def evaluated(self, step: int, scalars: Scalars) -> None:
        if self.config.metric not in scalars:  # Its evaler is not due.
            return
        value, self.since = scalars[self.config.metric], self.since + 1
        if value < self.best:
            self.best, self.since = value, 0
        if self.since == self.config.patience:
            self.run.stop(f"{self.config.metric} is not below {self.best:.4f}")


# --8<-- [end:watcher]


class Recorder(Watcher):
    """Writes down which methods are called, with the step."""

    def prepare(self, trainer):
        self.calls = [("prepare", trainer.config.max_step)]

    def started(self):
        self.calls.append(("started", self.run.start.step))

    def step_done(self, step, scalars):
        self.calls.append(("step_done", step))
        return scalars | {"twice_the_loss": 2 * scalars["loss"]}

    def between_steps(self, step):
        self.calls.append(("between_steps", step))

    def evaluated(self, step, scalars):
        assert scalars["val/loss"] == self.run.evaluations["val"]["loss"]
        self.calls.append(("evaluated", step))

    def before_save(self, step):
        self.run.wait()
        assert ("step_done", step) in self.calls
        self.calls.append(("before_save", step))

    def ended(self):
        self.calls.append(("ended", self.run.error))

    def rows(self):
        return [("calls", str(len(self.calls)))]


def test_a_run_stops_when_its_validation_loss_rises(tmp_path):
    cfg = tiny.trainer_config(tmp_path, max_step=40)
    cfg.evalers["val"].eval_policy.set(n=1)
    cfg.learner.optimizer.learning_rate = 30.0  # Diverges.
    # --8<-- [start:config]
    cfg.watchers["stop_when_worse"] = StopWhenWorse.default_config().set(patience=3)
    # --8<-- [end:config]
    trainer = cfg.instantiate(parent=None)
    result = trainer.run()
    assert result["step"] < 40
    assert result["stopped_by"].startswith("val/loss is not below")
    assert trainer.checkpointer.latest_step() == result["step"]
    assert RunFolder(tmp_path).events()[-1]["stopped_by"] == result["stopped_by"]


def test_watchers_are_called_at_their_moments_and_add_metrics_and_rows(tmp_path, capsys):
    cfg = tiny.trainer_config(tmp_path, max_step=4)
    cfg.watchers["recorder"] = Recorder.default_config()
    trainer = cfg.instantiate(parent=None)
    trainer.run()
    calls = trainer.watchers["recorder"].calls
    steps = [("between_steps", 1), ("step_done", 1), ("between_steps", 2), ("step_done", 2)]
    assert calls[:6] == [("prepare", 4), ("started", 0), *steps]
    assert calls[-3:] == [("evaluated", 4), ("before_save", 4), ("ended", None)]
    assert f"calls {len(calls)}" in " ".join(capsys.readouterr().out.split())
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-2])
    assert line["twice_the_loss"] == pytest.approx(2 * line["loss"])


def test_an_evaluation_without_the_metric_does_not_count(tmp_path):
    watcher = StopWhenWorse.default_config().set(patience=1).instantiate()
    watcher.run = mock.Mock()
    watcher.started()
    for scalars in ({"val/loss": 2.0}, {"other/loss": 3.0}, {"val/loss": 1.0}):
        watcher.evaluated(1, scalars)
    assert not watcher.run.stop.called
    watcher.evaluated(1, {"val/loss": 1.5})
    assert watcher.run.stop.called


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda scalars: None, "Dropping must return all metrics"),
        (lambda scalars: {}, "Dropping must return all metrics"),
        (lambda scalars: scalars | {"loss": "low"}, "Dropping returns 'low' as 'loss'"),
    ],
)
def test_a_watcher_that_drops_metrics_or_returns_no_number_is_named(tmp_path, returned, message):
    class Dropping(Watcher):
        def step_done(self, step, scalars):
            return returned(scalars)

    cfg = tiny.trainer_config(tmp_path, max_step=4, evaler=False).set(checkpointer=None)
    trainer = cfg.instantiate(parent=None)
    trainer.watchers = {**trainer.watchers, "own": Dropping.default_config().instantiate()}
    with pytest.raises(UserError, match=message):
        trainer.run()


@pytest.mark.parametrize("name", ["goodput", "watchdog", "profiler"])
def test_a_name_of_a_built_in_watcher_is_refused(tmp_path, name):
    cfg = tiny.trainer_config(tmp_path)
    cfg.watchers[name] = Recorder.default_config()
    with pytest.raises(UserError, match=f"watchers.{name}"):
        cfg.instantiate(parent=None)


def test_an_error_of_a_watcher_ends_the_run_with_its_metrics_logged(tmp_path):
    class Failing(Watcher):
        def step_done(self, step, scalars):
            raise ValueError("own")

    cfg = tiny.trainer_config(tmp_path, max_step=4, evaler=False).set(checkpointer=None)
    trainer = cfg.instantiate(parent=None)
    failing = Failing.default_config().instantiate()
    trainer.watchers = {**trainer.watchers, "failing": failing}
    failing.path = "watchers.failing"  # Set with the trainer.
    with pytest.raises(ValueError, match="own") as raised:
        trainer.run()
    assert raised.value.__notes__ == [f"Raised by watchers.failing, a {Failing.__qualname__}."]
    assert list(tiny.losses(tmp_path)) == [1]
    assert isinstance(failing.run.error, ValueError)
    assert RunFolder(tmp_path).events()[-1]["error"] == "ValueError: own"


class EndsBadly(Recorder):
    def ended(self):
        raise UserError("no disk")


def test_a_run_whose_watcher_cannot_end_has_failed_and_the_others_end(tmp_path):
    cfg = tiny.trainer_config(tmp_path, max_step=2, evaler=False).set(checkpointer=None)
    cfg.watchers = {"first": Recorder.default_config(), "second": EndsBadly.default_config()}
    trainer = cfg.instantiate(parent=None)
    with pytest.raises(UserError, match="no disk") as raised:
        trainer.run()
    assert one_line(raised.value).startswith("no disk Raised by watchers.second, a EndsBadly.")
    assert trainer.watchers["first"].calls[-1] == ("ended", raised.value)
    assert RunFolder(tmp_path).events()[-1]["error"] == "UserError: no disk"


class GoesBack(Watcher):
    @config_class
    class Config(Watcher.Config):
        when: str = "step_done"

    def _go_back(self, when):
        if when == self.config.when:
            raise GoBack("again", durable=True)

    def step_done(self, step, scalars):
        self._go_back("step_done")
        return scalars

    def rows(self):
        self._go_back("rows")
        return ()

    def ended(self):
        self._go_back("ended")


@pytest.mark.parametrize(
    ("when", "message"),
    [
        ("step_done", r"the run went back 10 times from here \(again\)"),
        ("rows", "watchers.own: GoBack .* after the last step"),
        ("ended", "watchers.own: GoBack .* after the last step"),
    ],
)
@pytest.mark.parametrize("saves", [False, True])
def test_a_watcher_cannot_go_back_for_ever(tmp_path, when, message, saves):
    cfg = tiny.trainer_config(tmp_path, max_step=2, evaler=False)
    if not saves:
        cfg.checkpointer = None
    cfg.watchers = {"own": GoesBack.default_config().set(when=when)}
    with pytest.raises(UserError, match=message):
        cfg.instantiate(parent=None).run()
    events = [x for x in RunFolder(tmp_path).events() if x["event"] == "go_back"]
    assert [x["reason"] for x in events] == ["again"] * (10 if when == "step_done" else 0)


class FailsTwice(EndsBadly):
    def step_done(self, step, scalars):
        raise ValueError("first")


def test_the_first_error_of_a_run_is_that_of_the_run(tmp_path, caplog):
    cfg = tiny.trainer_config(tmp_path, max_step=2, evaler=False).set(checkpointer=None)
    cfg.watchers = {"mine": FailsTwice.default_config()}
    with pytest.raises(ValueError, match="first"):
        cfg.instantiate(parent=None).run()
    assert "watchers.mine could not end" in caplog.text
    assert "no disk" in caplog.text
