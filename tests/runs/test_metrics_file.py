"""Metrics read back: what a writer wrote, lines that are damaged, and lines that are appended."""

import json
import math

import pytest

from moelib.core.errors import UserError
from moelib.runs.metrics_file import MetricsReader, read_metrics
from moelib.runs.summary_writer import SummaryWriter

WHOLE = b'{"step": 10, "time": 1.0, "loss": 2.5, "mean_loss": 2.5}\n'


def write(path, *lines):
    with open(path / "metrics.jsonl", "ab") as file:
        file.writelines(lines)


@pytest.mark.parametrize("names", [(), ("loss", "val/loss", 'a"b')])
def test_written_metrics_are_read_with_their_names_and_values(tmp_path, names):
    cfg = SummaryWriter.default_config().set(
        dir=str(tmp_path), jsonl_path=str(tmp_path / "metrics.jsonl"), formats=["json_lines"]
    )
    writer = cfg.set(name="writer").instantiate(parent=None)
    writer.write(1, {"loss": 2.5e-7})
    writer.write(2, {"loss": math.nan})
    writer.write(2, {"loss": 3.0}, group="val")
    writer.close()
    found = [
        {k: x for k, x in line.items() if k != "time"} for line in read_metrics(tmp_path, names)
    ]
    assert found == [
        {"step": 1, "loss": 2.5e-7},
        {"step": 2, "loss": None},
        {"step": 2, "val/loss": 3.0},
    ]


@pytest.mark.parametrize("names", [(), ("loss", "step_seconds")])
def test_damaged_and_incomplete_lines_are_named_and_skipped(tmp_path, caplog, names):
    damaged = [b"\n", b'{"step": 1, "lo{"step": 2, "loss": 1.0}\n', b"\xff\n", b"[1]\n"]
    damaged += [b'{"step": null, "loss": 1.0}\n', b'{"step": 1e999}\n', b"[" * 20000 + b"\n"]
    write(tmp_path, WHOLE, *damaged, WHOLE, b'{"step": 20, "lo')
    assert [line["step"] for line in read_metrics(tmp_path, names)] == [10, 10]
    assert "2, 3, 4, 5, 6 and 2 more" in caplog.text
    assert "of 16 bytes" in caplog.text


def test_a_folder_without_metrics_has_no_lines_and_an_unreadable_file_is_named(tmp_path):
    assert list(read_metrics(tmp_path)) == []
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"metrics\.jsonl cannot be read"):
        list(read_metrics(tmp_path))


def test_a_reader_goes_on_where_it_stopped_and_sees_that_the_file_was_replaced(tmp_path):
    reader = MetricsReader(tmp_path)
    assert not list(reader.read())
    write(tmp_path, WHOLE, WHOLE[:20])
    assert len(list(reader.read())) == 1
    write(tmp_path, WHOLE[20:])
    assert len(list(reader.read())) == 1
    assert not reader.damage()
    assert not reader.is_replaced()
    (tmp_path / "other").write_bytes(WHOLE * 3)
    (tmp_path / "other").rename(tmp_path / "metrics.jsonl")
    assert reader.is_replaced()
    reader.reset()
    assert len(list(reader.read())) == 3


def test_only_the_last_line_of_training_is_read_and_all_evaluations(tmp_path):
    evaluations = [json.dumps({"step": s, "val/loss": 1.0}).encode() + b"\n" for s in (10, 20)]
    write(tmp_path, WHOLE, evaluations[0], WHOLE, evaluations[1], WHOLE.replace(b"10", b"30"))
    reader = MetricsReader(tmp_path, only_last=True)
    assert [line["step"] for line in reader.read()] == [10, 20, 30]
