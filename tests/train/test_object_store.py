"""Runs in folders of an object store: resumed, damaged, read; the properties of local ones."""

import json

import numpy as np
import pytest

from moelib.checkpoint.checkpointer import Checkpointer
from moelib.checkpoint.restore import restore_arrays
from moelib.core.errors import UserError
from moelib.data.sources.source import InMemorySource
from moelib.data.tokens.prepare import prepare
from moelib.data.tokens.token_store import TokenStore
from moelib.runs.folder import RunFolder
from moelib.runs.loading import load_model
from moelib.runtime import lock as lock_module
from moelib.runtime import storage
from moelib.runtime.files import read_text
from moelib.runtime.lock import DirectoryInUseError, directory_lock
from moelib.train.convert import from_hugging_face, to_hugging_face
from tests import tiny
from tests.train import small_run
from tests.train.test_processes import finish, start, start_two


def run(directory, *, max_step=8, **fields):
    """Trains, and returns the parameters and the metrics by step."""
    trainer = (
        tiny.trainer_config(directory, max_step=max_step).set(**fields).instantiate(parent=None)
    )
    trainer.run()
    lines = read_text(f"{directory}/metrics.jsonl").splitlines()
    found = [json.loads(line) for line in lines]
    return trainer.trainer_state, {x["step"]: x["loss"] for x in found if "loss" in x}


def test_a_resumed_run_equals_an_unbroken_local_one(s3, tmp_path):
    url = f"{s3}/runs/a"
    run(url, max_step=4)
    state, losses = run(url, accept_changes=("schedule",))
    expected, expected_losses = run(tmp_path / "run")
    tiny.assert_trees_equal(state, expected)
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
    kinds = [event["event"] for event in RunFolder(url).events()]
    assert [kind for kind in kinds if kind in ("start", "end")] == ["start", "end"] * 2
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
    tiny.assert_trees_equal(again, expected)
    assert losses == expected_losses


def test_a_second_trainer_is_refused(s3, monkeypatch):
    monkeypatch.setattr(lock_module, "RENEW_SECONDS", 0.1)
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


@pytest.mark.slow
def test_a_run_on_a_store_at_a_url_is_read_evaluated_and_converted(s3, tmp_path):
    source = small_run.make_store(tmp_path / "store")
    fs = storage.filesystem(s3)
    fs.put(str(tmp_path / "store"), f"{s3}/data/store", recursive=True)
    remote = source.clone(path=f"{s3}/data/store")
    losses = []
    for url, store in ((f"{s3}/run", remote), (str(tmp_path / "run"), source)):
        trainer = small_run.trainer_config(url, store, max_step=2).instantiate(parent=None)
        losses.append(trainer.run()["loss"])
    assert losses[0] == losses[1]
    assert (
        TokenStore.default_config()
        .set(path=remote.path)
        .instantiate()
        .at(np.array([3, 40]))
        .tolist()
        == source.instantiate().at(np.array([3, 40])).tolist()
    )
    here, there = (load_model(url) for url in (str(tmp_path / "run"), f"{s3}/run"))
    tiny.assert_trees_equal(there.parameters, here.parameters)
    assert there.tokenizer.encode("document") == here.tokenizer.encode("document")
    to_hugging_face(f"{s3}/run", str(tmp_path / "hub"))
    assert (tmp_path / "hub" / "model.safetensors").exists()
    with pytest.raises(UserError, match=r"s3://.*/hub'; set a local folder"):
        to_hugging_face(f"{s3}/run", f"{s3}/hub")
    from_hugging_face(str(tmp_path / "hub"), f"{s3}/again")
    tiny.assert_trees_equal(load_model(f"{s3}/again").parameters, here.parameters)


def test_damage_of_a_store_at_a_url_is_found(s3, tmp_path):
    source = small_run.make_store(tmp_path / "store")
    fs = storage.filesystem(s3)
    fs.put(str(tmp_path / "store"), f"{s3}/store", recursive=True)
    remote = source.clone(path=f"{s3}/store")
    remote.instantiate().verify()
    url = f"{s3}/store/tokens-00000.bin"
    data = bytearray(storage.read_bytes(url))
    data[10] ^= 1
    storage.write_bytes(url, bytes(data))
    with pytest.raises(UserError, match=r"tokens-00000\.bin are not those that were written"):
        remote.instantiate()
    storage.write_bytes(url, bytes(data[:-2]))
    with pytest.raises(UserError, match=r"tokens-00000\.bin has \d+ bytes"):
        remote.instantiate()
    storage.remove(url)
    with pytest.raises(UserError, match=r"tokens-00000\.bin is missing"):
        remote.instantiate()
    with pytest.raises(UserError, match=r"s3://.*/out'; set a local folder"):
        prepare(InMemorySource.default_config().set(texts=["a"]).instantiate(), None, f"{s3}/out")


@pytest.mark.slow
def test_a_killed_process_is_resumed_with_the_same_losses(s3, tmp_path, monkeypatch):
    monkeypatch.setattr(lock_module, "STALE_SECONDS", 2.0)
    finish(start(f"{s3}/run", "--signal_at", 6, "--signal", "SIGKILL"), code=-9)
    assert storage.list_names(f"{s3}/run/checkpoints") == ["step_00000004"]
    assert storage.exists(f"{s3}/run/.lock-000001")
    assert run(f"{s3}/run")[1] == run(tmp_path / "run")[1]


@pytest.mark.slow
def test_two_processes_save_and_restore(s3, tmp_path):
    for finished in ("--max_step", 4), ("--max_step", 8):
        processes = start_two(f"{s3}/run", *finished)
        assert [finish(each)[0]["step"] for each in processes] == [finished[1]] * 2
    assert storage.list_names(f"{s3}/run/checkpoints") == ["step_00000004", "step_00000008"]
    for finished in ("--max_step", 4), ("--max_step", 8):
        for each in start_two(tmp_path / "run", *finished):
            finish(each)
    restored = [
        Checkpointer.default_config().set(dir=f"{folder}/checkpoints").instantiate(parent=None)
        for folder in (f"{s3}/run", tmp_path / "run")
    ]
    remote, local = (restore_arrays(each.dir) for each in restored)
    assert remote.record.checksums == local.record.checksums
    tiny.assert_trees_equal(remote.state, local.state)
