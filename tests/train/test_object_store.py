"""Runs in folders of an object store: resumed, damaged, read; the properties of local ones."""

import json

import numpy as np
import pytest

from moelib.core import lease, storage
from moelib.core.directory_lock import DirectoryInUseError, directory_lock
from moelib.core.errors import UserError
from moelib.core.files import read_text
from moelib.train.run_log import log_event, read_events
from tests import tiny


def run(directory, *, max_step=8, **fields):
    """Trains, and returns the parameters and the metrics by step."""
    trainer = (
        tiny.trainer_config(directory, max_step=max_step).set(**fields).instantiate(parent=None)
    )
    trainer.run()
    lines = read_text(f"{directory}/metrics.jsonl").splitlines()
    found = [json.loads(line) for line in lines]
    return trainer.trainer_state, {x["step"]: x["loss"] for x in found if "loss" in x}


def assert_equal(a, b):
    for x, y in zip(*(tiny.jax.tree.leaves(each) for each in (a, b)), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_a_resumed_run_equals_an_unbroken_local_one(s3, tmp_path):
    url = f"{s3}/runs/a"
    run(url, max_step=4)
    log_event(url, "stop", step=4)
    log_event(url, "start", step=4)
    state, losses = run(url, accept_changes=("schedule",))
    expected, expected_losses = run(tmp_path / "run")
    assert_equal(state, expected)
    assert losses == expected_losses
    assert list(losses) == list(range(1, 9))
    names = storage.list_names(url)
    assert sorted(names) == [
        "checkpoints",
        "config.txt",
        "events.jsonl",
        "metrics.jsonl",
        "run.json",
        "summaries",
    ]
    assert [event["event"] for event in read_events(url)] == ["stop", "start"]
    events = storage.filesystem(url).find(f"{url}/summaries/train")
    assert len(events) == 2
    # A flipped byte: the previous checkpoint is restored, and the steps after it are taken again.
    path = f"{url}/checkpoints/step_00000008"
    objects = storage.filesystem(url).find(f"{path}/state")
    chunk = "s3://" + max(objects, key=lambda x: len(storage.read_bytes(f"s3://{x}")))
    data = bytearray(storage.read_bytes(chunk))
    data[len(data) // 2] ^= 1
    storage.write_bytes(chunk, bytes(data))
    again, losses = run(url, accept_changes=("schedule",))
    assert_equal(again, expected)
    assert losses == expected_losses


def test_a_second_trainer_is_refused(s3, monkeypatch):
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.1)
    with (
        directory_lock(f"{s3}/run", setting="dir"),
        pytest.raises(
            DirectoryInUseError, match=r"s3://.*/run is in use \(process .*--trainer_dir"
        ),
    ):
        run(f"{s3}/run")


def test_a_missing_bucket_is_one_line(s3):
    with pytest.raises(UserError, match=r"-missing/run.*no such object or bucket"):
        run(f"{s3}-missing/run")
