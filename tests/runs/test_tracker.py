"""Trackers: they see the metrics of metrics.jsonl, once, and never stop, delay or reveal a run.

The tests of services are slow, and need `pip install 'moelib[wandb,mlflow]'`.
"""

import contextlib
import json
import struct
import threading

import pytest

from moelib.core.config import config_class
from moelib.core.config_text import set_from_text
from moelib.core.errors import UserError
from moelib.runs.folder import RunFolder
from moelib.runs.secret import Secret
from moelib.runs.summary_writer import SummaryWriter
from moelib.runs.tracker import MlflowTracker, Tracker, TrackerThread, WandbTracker
from tests import tiny

CANARY = "canary0123456789canary0123456789canary01"
NAME = "tests.runs.test_tracker:Recorder"


class Recorder(Tracker):
    """A service in this process: runs by id."""

    runs: dict = {}

    @config_class
    class Config(Tracker.Config):
        api_key: Secret | None = None

    def start(self, config_text, run_name, resume_id, folder):
        self.id = resume_id or f"id{len(self.runs)}"
        self.run = self.runs.setdefault(self.id, {"name": run_name, "lines": [], "status": []})
        self.run["config"] = config_text
        return self.id

    def write(self, step, scalars):
        self.run["lines"].append({"step": step, **scalars})

    def close(self, status):
        self.run["status"].append(status)


@pytest.fixture(autouse=True)
def runs(monkeypatch):
    monkeypatch.setattr(Recorder, "runs", {})
    return Recorder.runs


def trainer_config(folder, *sets, max_step):
    cfg = tiny.trainer_config(folder, max_step=max_step, save_every=max_step // 2)
    for text in sets:
        set_from_text(cfg, f"summary_writer.trackers.{text}")
    return cfg


def test_a_tracker_gets_the_lines_of_metrics_jsonl_and_no_secret(
    tmp_path, runs, capfd, monkeypatch
):
    monkeypatch.setenv("MY_KEY", CANARY)
    cfg = trainer_config(tmp_path / "a", f"own={NAME}", "own.api_key=env:MY_KEY", max_step=2)
    cfg.instantiate(parent=None).run()
    cfg.prng_seed = 7  # Refused: another run's folder.
    with pytest.raises(UserError):
        cfg.instantiate(parent=None).run()
    (run,) = runs.values()
    lines = [json.loads(x) for x in (tmp_path / "a/metrics.jsonl").read_text().splitlines()]
    assert [{"time": x["time"], **y} for x, y in zip(lines, run["lines"], strict=True)] == lines
    assert (run["name"], run["status"]) == ("a", ["finished"])
    assert "api_key: 'env:MY_KEY'" in run["config"]
    assert_nowhere(tmp_path, *capfd.readouterr())


def assert_nowhere(folder, *texts):
    """Asserts that the secret is in no file below a folder, and in none of the texts."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if CANARY.encode() in path.read_bytes()]
    assert not [text for text in texts if CANARY in text]


def writer(folder, tracker):
    folder.mkdir(exist_ok=True)
    cfg = SummaryWriter.default_config().set(formats=("json_lines",), trackers={"own": tracker})
    cfg.set(dir=str(folder / "summaries"), jsonl_path=str(folder / "metrics.jsonl"))
    return cfg.instantiate(parent=None)


def test_a_resumed_run_continues_under_its_id_and_tells_how_it_ended(tmp_path, runs):
    for stopped_by in ("SIGTERM", "end of input"):
        with_tracker = writer(tmp_path / "r", Recorder.default_config())
        with_tracker.start_trackers("a: 1\n")
        with_tracker.close_trackers(stopped_by)
    failing = writer(tmp_path / "r", Recorder.default_config())
    failing.start_trackers("a: 1\n")
    with pytest.raises(KeyError):
        fail(failing.close_trackers)
    assert [run["status"] for run in runs.values()] == [["stopped", "finished", "failed"]]
    events = [event | {"time": 0} for event in RunFolder(tmp_path / "r").events()]
    assert events == [{"time": 0, "event": "tracker", "name": "own", "id": "id0"}]


def fail(callback):
    with contextlib.ExitStack() as stack:
        stack.callback(callback)
        raise KeyError


class Failing(Recorder):
    def write(self, step, scalars):
        if step in (2, 3):
            raise ConnectionError(f"https://me:{CANARY}@host is down")
        super().write(step, scalars)


def test_a_failure_is_logged_once_and_training_goes_on(tmp_path, runs, caplog):
    with_tracker = writer(tmp_path, Failing.default_config())
    with_tracker.start_trackers("")
    for step in range(1, 6):
        with_tracker.write(step, {"loss": 1.0})
    with_tracker.close_trackers()
    with_tracker.close()
    assert [line["step"] for line in runs["id0"]["lines"]] == [1, 4, 5]
    assert [r.levelname for r in caplog.records] == ["ERROR", "ERROR"]
    assert "own: ConnectionError: https://me:***@host is down" in caplog.messages[0]
    assert "after 2 failures" in caplog.messages[1]


class Hanging(Recorder):
    release = threading.Event()

    def start(self, config_text, run_name, resume_id, folder):
        self.release.wait()
        return super().start(config_text, run_name, resume_id, folder)


def test_a_service_that_hangs_delays_no_write_and_ends_in_time(tmp_path, caplog):
    cfg = Hanging.default_config().set(close_timeout_seconds=0.1, max_waiting=5)
    thread = TrackerThread("own", cfg.instantiate(), "", RunFolder(tmp_path))
    for step in range(8):
        thread.write(step, {"loss": 1.0})
    thread.close("finished")
    Hanging.release.set()
    assert "from step 5" in caplog.messages[0]
    assert "8 writes were not sent" in caplog.messages[1]


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for cls, extra in ((WandbTracker, "wandb"), (MlflowTracker, "mlflow")):
        cfg = cls.default_config()
        if cls is MlflowTracker:
            cfg.tracking_uri = "http://127.0.0.1:1"
        with pytest.raises(UserError, match=rf"pip install 'moelib\[{extra}\]'"):
            writer(tmp_path, cfg).start_trackers("")


def test_an_unset_field_is_an_error_when_the_trainer_is_built(tmp_path):
    cfg = trainer_config(tmp_path, "m=moelib.runs.tracker:MlflowTracker", max_step=2)
    with pytest.raises(UserError, match=r"summary_writer\.trackers\.m\.tracking_uri"):
        cfg.instantiate(parent=None)


def test_a_missing_secret_is_an_error_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    cfg = WandbTracker.default_config().set(api_key="env:NO_SUCH_VARIABLE")
    with pytest.raises(UserError, match="env:NO_SUCH_VARIABLE"):
        writer(tmp_path, cfg).start_trackers("")


# -- Services ------------------------------------------------------------------------------------


def stop_and_resume(tmp_path, monkeypatch, *sets):
    """Runs 8 steps with a failure in step 7: steps 5 and 6 are taken again. Returns the folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for fails in (True, False):
        trainer = trainer_config(tmp_path / "run", *sets, max_step=8).instantiate(parent=None)
        if fails:
            step = trainer.run_step

            def failing(batch, *, input_state=None, step=step, trainer=trainer):
                if trainer.step == 6:
                    raise RuntimeError("no step 7")
                return step(batch, input_state=input_state)

            monkeypatch.setattr(trainer, "run_step", failing)
            with pytest.raises(RuntimeError, match="no step 7"):
                trainer.run()
        else:
            trainer.run()
    return tmp_path / "run"


def wandb_records(path):
    """Yields the records in a file of W&B: LevelDB's log format after 7 bytes of its own."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, record = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # The padding of a block.
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # Full, last.
            yield Record.FromString(record)
            record = b""


@pytest.mark.slow
def test_wandb_offline(tmp_path, monkeypatch, capfd):
    pytest.importorskip("wandb", reason="pip install 'moelib[wandb]'")
    monkeypatch.setenv("WANDB_API_KEY", CANARY)
    tracker = "w=moelib.runs.tracker:WandbTracker", "w.mode=offline", "w.api_key=env:WANDB_API_KEY"
    folder = stop_and_resume(tmp_path, monkeypatch, *tracker)
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    losses, ids = [], set()
    for path in files:
        records = list(wandb_records(path))
        (run,) = (x.run for x in records if x.WhichOneof("record_type") == "run")
        ids.add(run.run_id)
        settings = {x.key: json.loads(x.value_json) for x in run.config.update}
        assert settings["summary_writer.trackers.w.api_key"] == "'env:WANDB_API_KEY'"
        losses += [
            (x.history.step.num, json.loads(item.value_json))
            for x in records
            for item in x.history.item
            if "/".join(item.nested_key or [item.key]) == "loss"
        ]
        (end,) = (x.exit for x in records if x.WhichOneof("record_type") == "exit")
        assert end.exit_code == (path == files[0])
    (run_id,) = {x["id"] for x in RunFolder(folder).events()}
    assert ids == {run_id}
    lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    assert dict(losses) == {x["step"]: x["loss"] for x in lines if "loss" in x}
    assert_nowhere(tmp_path, *capfd.readouterr())


@pytest.mark.slow
def test_mlflow_file_store(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="pip install 'moelib[mlflow]'")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"file://{tmp_path}/store"
    tracker = "m=moelib.runs.tracker:MlflowTracker", f"m.tracking_uri={uri}"
    folder = stop_and_resume(tmp_path, monkeypatch, *tracker)
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("moelib").experiment_id
    (run,) = client.search_runs([experiment])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.info.run_id == RunFolder(folder).events()[0]["id"]
    assert run.data.params["learner.optimizer.learning_rate"] == "0.02"
    lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    for name in ("loss", "val/loss"):
        history = client.get_metric_history(run.info.run_id, name)
        found = sorted((metric.step, metric.value) for metric in history)
        assert found == [(x["step"], x[name]) for x in lines if name in x]
