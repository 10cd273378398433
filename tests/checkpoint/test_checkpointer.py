"""Checkpoints: what is written and kept, which of them is read; damage and full disks."""

import errno
import logging
import os
import resource
import signal
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.checkpoint import arrays, contents
from moelib.checkpoint import checkpointer as checkpointer_module
from moelib.checkpoint.contents import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    RunRecord,
    UnreadableCheckpointError,
    list_checkpoints,
    step_path,
)
from moelib.core.errors import UserError
from moelib.runtime import storage
from tests.checkpoint.small import (
    DAMAGES,
    make,
    make_state,
    remove_record,
    save,
    target_of,
    tear_record,
    truncate_arrays,
)


def test_nothing_there_is_none(checkpointer):
    assert checkpointer.restore(target_of(make_state())) is None
    assert checkpointer.latest_step() is None


def test_old_ones_are_deleted(tmp_path):
    metrics = {2: 5.0, 4: 1.0, 6: 3.0, 8: 4.0}
    checkpointer = make(
        tmp_path, keep_last_n=1, keep_every_n_steps=6, keep_best_n=1, best_metric="val/loss"
    )
    for step, value in metrics.items():
        save(checkpointer, step, metrics={"val/loss": value})
    checkpointer.close()
    assert list(list_checkpoints(tmp_path)) == [4, 6, 8]


@pytest.mark.parametrize(
    ("name", "number"),
    [("keep_last_n", -1), ("keep_every_n_steps", -1), ("keep_best_n", -1), ("keep_best_n", 1)],
)
def test_numbers_below_0_or_of_the_best_without_a_metric_are_refused(tmp_path, name, number):
    with pytest.raises(ValueError, match=f"{name}={number}"):
        make(tmp_path, **{name: number})


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_one_is_named_and_the_one_before_read(checkpointer, caplog, damage):
    save(checkpointer, 1)
    save(checkpointer, 2)
    damage(step_path(checkpointer.dir, 2))
    restored = checkpointer.restore(target_of(make_state()))
    assert restored.record.step == 1
    assert "trying the one before" in caplog.text
    assert "step_00000002" in caplog.text
    assert checkpointer.latest_step() == 1
    save(checkpointer, 2)  # It can be written again.
    assert checkpointer.restore(target_of(make_state())).record.step == 2


UNREADABLE = [
    PermissionError(errno.EACCES, "Permission denied"),
    OSError(errno.EIO, "Input/output error"),
    MemoryError("Unable to allocate"),
    jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes"),
    RuntimeError("a text that no version has had yet"),
]


@pytest.mark.parametrize("error", UNREADABLE, ids=repr)
@pytest.mark.parametrize("item", ["record", "arrays"])
def test_error_outside_the_checkpoint_is_one_line(checkpointer, monkeypatch, error, item):
    save(checkpointer, 1)
    save(checkpointer, 2)

    def fail(*args, **kwargs):
        raise error

    if item == "arrays":
        monkeypatch.setattr(arrays, "_read", fail)
    else:
        monkeypatch.setattr(contents.json, "load", fail)
    with pytest.raises(UnreadableCheckpointError, match=r"^\S+step_00000002\S* .*$") as caught:
        checkpointer.restore(target_of(make_state()))
    assert caught.value.__cause__ is error
    assert checkpointer.latest_step() == 2


def test_file_that_the_system_does_not_open_is_no_damage(checkpointer):
    save(checkpointer, 1)
    save(checkpointer, 2)
    for folder, _, names in os.walk(os.path.join(step_path(checkpointer.dir, 2), "state")):
        for name in names if folder.endswith(os.sep + "d") else ():
            os.remove(os.path.join(folder, name))
            os.symlink("x" * 300, os.path.join(folder, name))  # ENAMETOOLONG.
    with pytest.raises(UnreadableCheckpointError, match="step_00000002"):
        checkpointer.restore(target_of(make_state()))
    assert checkpointer.latest_step() == 2


def test_record_that_cannot_be_read_deletes_no_checkpoint(tmp_path, monkeypatch, caplog):
    checkpointer = make(tmp_path, keep_last_n=1)
    save(checkpointer, 1)
    monkeypatch.setattr(contents.json, "load", lambda file: (_ for _ in ()).throw(UNREADABLE[1]))
    save(checkpointer, 2)
    checkpointer.close()
    assert list(list_checkpoints(tmp_path)) == [1, 2]
    assert "No old checkpoint is deleted" in caplog.text
    assert "step_00000001/record/metadata cannot be read: [Errno 5]" in caplog.text


def test_all_damaged_is_an_error(checkpointer):
    save(checkpointer, 1)
    truncate_arrays(step_path(checkpointer.dir, 1))
    with pytest.raises(DamagedCheckpointError, match=r"(?s)step_00000001"):
        checkpointer.restore(target_of(make_state()))


def test_an_older_one_of_another_config_does_not_hide_the_damage_of_the_newest(checkpointer):
    save(checkpointer, 1, {**make_state(), "more": jnp.ones(2)})
    save(checkpointer, 2)
    tear_record(step_path(checkpointer.dir, 2))
    with pytest.raises(CheckpointMismatchError, match=r"(?s)step_00000001.*'more'.*step_00000002"):
        checkpointer.restore(target_of(make_state()))


def test_step_that_is_missing_is_named(checkpointer):
    save(checkpointer, 5)
    restored = checkpointer.restore(target_of(make_state()), step=5)
    assert restored.record.step == 5
    jax.tree.map(np.testing.assert_array_equal, restored.state, make_state(5))
    with pytest.raises(CheckpointNotFoundError, match="step 7"):
        checkpointer.restore(target_of(make_state()), step=7)


def test_one_without_its_record_is_not_seen_and_moved_aside(checkpointer, caplog):
    save(checkpointer, 5)
    save(checkpointer, 9)
    remove_record(step_path(checkpointer.dir, 9))
    assert checkpointer.latest_step() == 5
    assert checkpointer.restore(target_of(make_state())).record.step == 5
    assert "step_00000009 has no record/metadata, and is not read: step 5 is the" in caplog.text
    with pytest.raises(CheckpointNotFoundError, match=r"step 9;.*step_00000009 lacks its record"):
        checkpointer.restore(target_of(make_state()), step=9)
    checkpointer.remove_unfinished()
    aside = "step_00000009.without_record"
    assert sorted(os.listdir(checkpointer.dir)) == ["step_00000005", aside]
    assert os.path.isdir(os.path.join(checkpointer.dir, aside, "state"))
    assert aside in caplog.text
    assert list(list_checkpoints(checkpointer.dir)) == [5]


def test_only_one_without_its_record_is_an_error_and_stays(checkpointer):
    save(checkpointer, 5)
    remove_record(step_path(checkpointer.dir, 5))
    for _ in range(2):
        with pytest.raises(DamagedCheckpointError, match="step_00000005 has no record/metadata"):
            checkpointer.remove_unfinished()
    assert os.listdir(checkpointer.dir) == ["step_00000005"]


def test_one_whose_deletion_was_killed_is_removed(checkpointer, monkeypatch):
    save(checkpointer, 5)
    monkeypatch.setattr(contents.storage, "remove_tree", mock.Mock(side_effect=SystemExit))
    with pytest.raises(SystemExit):
        contents.delete_checkpoint(step_path(checkpointer.dir, 5))
    monkeypatch.undo()
    checkpointer.remove_unfinished()  # Its record was removed, not lost.
    assert os.listdir(checkpointer.dir) == []


def test_one_is_deleted_from_a_full_disk(checkpointer, monkeypatch):
    save(checkpointer, 5)
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(contents.storage, "write_bytes", full)
    contents.delete_checkpoint(step_path(checkpointer.dir, 5))
    assert full.called
    assert os.listdir(checkpointer.dir) == []


def test_one_that_was_killed_before_its_record_is_removed(checkpointer, monkeypatch, caplog):
    def killed(record, path):
        raise SystemExit  # No failure, after which the checkpointer itself would remove it.

    monkeypatch.setattr(contents.CheckpointRecord, "write", killed)
    with pytest.raises(SystemExit):
        save(checkpointer, 5)
    assert os.listdir(checkpointer.dir) == ["step_00000005"]
    assert checkpointer.restore(target_of(make_state())) is None
    checkpointer.remove_unfinished()
    assert os.listdir(checkpointer.dir) == []
    assert "An incomplete checkpoint is removed" in caplog.text


def test_record_that_cannot_be_looked_for_removes_nothing(checkpointer, monkeypatch):
    save(checkpointer, 5)

    def fail(path):
        raise OSError(errno.EIO, "Input/output error", path)

    monkeypatch.setattr(storage, "size", fail)
    with pytest.raises(UserError, match="step_00000005 cannot be read: Input/output error"):
        checkpointer.remove_unfinished()
    assert os.listdir(checkpointer.dir) == ["step_00000005"]


def test_deletion_that_was_killed_is_not_seen_and_completed(tmp_path, monkeypatch):
    first = make(tmp_path, keep_last_n=1)
    save(first, 1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpointer_module, "_delete", remove_record)  # Killed after it.
        save(first, 2)
    first.close()
    assert len(os.listdir(tmp_path)) == 2
    assert list(list_checkpoints(str(tmp_path))) == [2]
    make(tmp_path).remove_unfinished()
    assert os.listdir(tmp_path) == ["step_00000002"]


def test_checkpoint_is_on_the_disk_before_it_has_its_record(checkpointer, monkeypatch):
    synced = []

    def sync(path, *, recursive=False):
        has_record = checkpointer.latest_step() is not None
        synced.append((os.path.relpath(path, checkpointer.dir), recursive, has_record))

    for module in (checkpointer_module, contents):
        monkeypatch.setattr(module, "sync_folder", sync)
    save(checkpointer, 1)
    assert synced == [
        ("step_00000001", True, False),
        (".", False, False),
        ("step_00000001/record", False, True),
    ]


def test_full_disk_is_logged_and_the_older_one_stays(checkpointer, caplog):
    save(checkpointer, 1)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))  # No file beyond 100 bytes.
        with caplog.at_level(logging.ERROR):
            save(checkpointer, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    [error] = [x.getMessage() for x in caplog.records if x.name == checkpointer_module.__name__]
    assert "NO CHECKPOINT of step 2" in error
    assert "Training continues. Step 1 is the newest." in error
    assert checkpointer.last_error is not None
    assert os.listdir(checkpointer.dir) == ["step_00000001"]
    save(checkpointer, 3)
    assert checkpointer.last_error is None
    assert checkpointer.restore(target_of(make_state())).record.step == 3


def test_checkpoint_that_takes_longer_than_the_interval_is_reported(
    checkpointer, monkeypatch, caplog
):
    monkeypatch.setattr(checkpointer_module, "_LONG_WAIT_SECONDS", -1.0)
    state = make_state(1)
    checkpointer.save(state, RunRecord(step=1))
    assert not caplog.text
    checkpointer.save(state, RunRecord(step=2))
    assert "The checkpoint of step 1 was still incomplete at step 2" in caplog.text


def test_folder_that_cannot_be_written_is_logged(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    checkpointer = make(tmp_path / "file" / "checkpoints")
    save(checkpointer, 2)
    assert "NO CHECKPOINT of step 2" in caplog.text
    assert "There is no older one." in caplog.text
