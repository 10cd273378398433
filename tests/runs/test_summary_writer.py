"""Metrics in JSON lines and event files, also of resumed runs and on full disks."""

import contextlib
import errno
import json
import os

import pytest
from tensorboard.compat.tensorflow_stub import errors

from moelib.runs import summary_writer
from moelib.runs.summary_writer import SummaryWriter, truncate_json_lines
from tests import tiny


def make(path, **settings):
    cfg = SummaryWriter.default_config().set(
        dir=str(path / "summaries"), jsonl_path=str(path / "metrics.jsonl"), **settings
    )
    return cfg.instantiate(parent=None)


def lines(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_json_lines(tmp_path):
    writer = make(tmp_path)
    writer.write(1, {"loss": 2.0, "norm": float("nan")})
    writer.write(1, {"loss": 3.0}, group="val")
    found = lines(tmp_path)
    writer.close()
    assert [line.pop("time") > 0 for line in found] == [True, True]
    assert found == [{"step": 1, "loss": 2.0, "norm": None}, {"step": 1, "val/loss": 3.0}]


def events_of(folder):
    """Returns the events in the one file of a folder, as TensorBoard reads them."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

    (path,) = folder.iterdir()
    reader, events = PyRecordReader_New(str(path)), []
    with contextlib.suppress(errors.OutOfRangeError):
        while True:
            reader.GetNext()
            events.append(Event.FromString(reader.record()))
    return events


def test_tensorboard_reads_what_is_written(tmp_path):
    writer = make(tmp_path, formats=("tensorboard",))
    writer.resume(4)
    writer.write(5, {"loss": 2.5})
    writer.write_text(5, "config", "a: 1\nb: 2\n")
    writer.close()
    assert not (tmp_path / "metrics.jsonl").exists()
    header, purge, scalars, text = events_of(tmp_path / "summaries" / "train")
    assert header.file_version == "brain.Event:2"
    assert purge.step == scalars.step == text.step == 5
    assert purge.session_log.status == purge.session_log.START
    assert [(v.tag, v.simple_value) for v in scalars.summary.value] == [("loss/loss", 2.5)]
    (value,) = text.summary.value
    assert (value.tag, value.metadata.plugin_data.plugin_name) == ("config", "text")
    assert value.tensor.string_val[0] == b"    a: 1\n    b: 2\n"


def test_tags_of_a_run_are_grouped(tmp_path):
    cfg = tiny.trainer_config(tmp_path, max_step=1)
    cfg.learner.norms_of = ["head"]
    cfg.instantiate(parent=None).run()
    tags = {v.tag for e in events_of(tmp_path / "summaries" / "train") for v in e.summary.value}
    assert {"loss/loss", "loss/aux_loss", "loss/perplexity", "optimizer/learning_rate"} <= tags
    assert {"optimizer/gradient_norm/head", "speed/tokens_per_second", "time/input"} <= tags
    assert {"tokens/num_tokens", "model/logits_max", "config"} <= tags
    groups = {tag.partition("/")[0] for tag in tags}
    assert groups == {*("config", "loss", "model", "optimizer", "speed", "time", "tokens")}


def test_resumed_run_drops_later_steps_and_incomplete_lines(tmp_path):
    writer = make(tmp_path, formats=("json_lines",))
    for step in (1, 2, 3):
        writer.write(step, {"loss": step})
    writer.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')
    writer.resume(2)
    writer.write(3, {"loss": 30.0})
    writer.close()
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == [(1, 1), (2, 2), (3, 30.0)]


def test_start_from_step_0_in_spite_of_later_metrics_is_a_warning(tmp_path, caplog):
    writer = make(tmp_path)
    writer.resume(0)
    for step in (10, 20):
        writer.write(step, {"loss": 1.0})
    writer.close()
    make(tmp_path).resume(20)
    assert not caplog.text
    make(tmp_path).resume(0)
    assert "up to step 20" in caplog.text


def test_full_disk_is_logged_once_and_writing_resumes(tmp_path, caplog, monkeypatch):
    writer = make(tmp_path)

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(writer, "_open_json_lines", full)
        for step in (1, 2):
            writer.write(step, {"loss": 1.0})
    assert caplog.text.count("NO METRICS of step 1: [Errno 28] No space left on device") == 1
    assert "step 2" not in caplog.text
    writer.write(3, {"loss": 1.0})
    writer.close()
    assert "written again, after 2 failures" in caplog.text
    assert [line["step"] for line in lines(tmp_path)] == [3]


def test_full_disk_at_closing_is_logged(tmp_path, caplog):
    writer = make(tmp_path, formats=("json_lines",)).config.clone(jsonl_path="/dev/full")
    writer = writer.instantiate(parent=None)
    writer.write(1, {"loss": 1.0})
    writer.close()
    assert "NO METRICS of step 1: [Errno 28] No space left on device" in caplog.text
    assert "THE LAST METRICS may not be on disk: [Errno 28]" in caplog.text
    writer.close()


def test_event_files_on_a_full_disk_are_closed(tmp_path, caplog):
    writer = make(tmp_path, formats=("tensorboard",))
    with open("/dev/full", "wb") as full:
        for group in ("train", "val"):
            writer.write(1, {"loss": 1.0}, group=group)
            os.dup2(full.fileno(), writer._events[group]._file.fileno())
    writer.write(2, {"loss": 1.0})
    writer.write(2, {"loss": 1.0}, group="val")
    files = [events._file for events in writer._events.values()]
    writer.close()
    assert [file.closed for file in files] == [True, True]
    assert caplog.text.count("THE LAST METRICS may not be on disk: [Errno 28]") == 2


def test_event_file_without_a_header_is_removed(tmp_path, monkeypatch):
    def full(self, **fields):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(summary_writer._EventFile, "_add", full)
    writer = make(tmp_path, formats=("tensorboard",))
    writer.write(1, {"loss": 1.0})
    writer.close()
    assert not list((tmp_path / "summaries" / "train").iterdir())


def test_run_on_a_full_disk_can_be_resumed(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    (tmp_path / f"metrics.jsonl.tmp-{os.getpid()}").symlink_to("/dev/full")
    make(tmp_path).resume(1)
    assert "METRICS after step 1 stay in" in caplog.text
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_a_line_that_is_nested_too_deeply_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + "[" * 200_000 + "\n")
    truncate_json_lines(str(path), 3)
    assert path.read_text() == '{"step": 1}\n'


@pytest.mark.parametrize(("steps", "warned"), [("1 2 2 9", 0), ("2 1 3", 1), ("1 1.5", 1)])
def test_lines_not_in_the_order_of_steps_are_a_warning(tmp_path, caplog, steps, warned):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in steps.split()))
    truncate_json_lines(str(path), 3)
    assert len(caplog.records) == warned


@pytest.mark.parametrize("content", ["", None])
def test_nothing_to_truncate(tmp_path, content):
    path = tmp_path / "metrics.jsonl"
    if content is not None:
        path.write_text(content)
    truncate_json_lines(str(path), 3)
    assert not path.exists() if content is None else path.read_text() == content
