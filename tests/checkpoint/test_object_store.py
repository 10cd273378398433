"""Checkpoints on a server of S3's protocol: complete with their record alone; damage; formats."""

import jax
import numpy as np
import pytest
import s3fs

from moelib.checkpoint import arrays, contents, writers
from moelib.checkpoint import checkpointer as checkpointer_module
from moelib.checkpoint.contents import list_checkpoints, step_path
from moelib.core import tree
from moelib.core.errors import UserError
from moelib.runtime import storage
from tests.checkpoint.small import make, make_state, save, target_of
from tests.two_processes import run_as_two


def arrays_of(url):
    return [x for x in storage.filesystem(url).find(f"{url}/state") if ".zarray" not in x]


def assert_equal(restored, state):
    assert restored.record.step == int(state["step"])
    for (name, x), (_, y) in zip(
        tree.flatten_items(restored.state), tree.flatten_items(state), strict=True
    ):
        assert x.dtype == y.dtype, name
        np.testing.assert_array_equal(x, y, err_msg=name)


def test_checkpoints_are_read_on_another_mesh_and_old_ones_deleted(s3):
    checkpointer = make(f"{s3}/run/checkpoints/", keep_last_n=2)
    assert checkpointer.restore(target_of(make_state())) is None
    sharded = jax.tree.map(
        lambda x, like: jax.device_put(x, like.sharding), make_state(3), target_of(make_state())
    )
    for step in (1, 2):
        save(checkpointer, step)
    save(checkpointer, 3, sharded)
    assert checkpointer.last_error is None
    checkpointer.close()
    assert list(list_checkpoints(checkpointer.dir)) == [2, 3]
    assert storage.list_names(checkpointer.dir) == ["step_00000002", "step_00000003"]
    assert_equal(checkpointer.restore(target_of(make_state(), 2)), make_state(3))
    assert_equal(checkpointer.restore(target_of(make_state()), step=2), make_state(2))


def test_one_without_its_record_is_not_seen_and_is_removed(s3):
    checkpointer = make(f"{s3}/run")
    save(checkpointer, 1)
    save(checkpointer, 2)
    storage.remove(f"{step_path(checkpointer.dir, 2)}/{contents.RECORD_FILE}")
    assert checkpointer.latest_step() == 1
    assert_equal(checkpointer.restore(target_of(make_state())), make_state(1))
    checkpointer.remove_unfinished()
    aside = "step_00000002.without_record"
    assert sorted(storage.list_names(checkpointer.dir)) == ["step_00000001", aside]
    save(checkpointer, 2)
    assert checkpointer.latest_step() == 2
    checkpointer.close()


def flip(url):
    data = bytearray(storage.read_bytes(url))
    data[-1] ^= 1
    storage.write_bytes(url, bytes(data))


def store_zeros(url):
    name = url.rsplit("/state/", 1)[1].split("/")[0]
    like = {"model.w": (8, 8)}[name]
    import tensorstore as ts

    store = ts.open(arrays.array_spec(url.rsplit("/state/", 1)[0], name), open=True).result()
    store[...].write(np.zeros(like, np.float32)).result()


@pytest.mark.parametrize("damage", [flip, storage.remove, store_zeros])
def test_damage_of_an_object_is_found_and_the_one_before_read(s3, caplog, damage):
    checkpointer = make(f"{s3}/run")
    save(checkpointer, 1)
    save(checkpointer, 2)
    path = step_path(checkpointer.dir, 2)
    damage(next(f"s3://{x}" for x in arrays_of(path) if "model.w" in x))
    assert_equal(checkpointer.restore(target_of(make_state())), make_state(1))
    assert "step_00000002" in caplog.text
    save(checkpointer, 2)  # It can be written again.
    assert_equal(checkpointer.restore(target_of(make_state())), make_state(2))
    checkpointer.close()


def test_a_failed_save_leaves_the_older_one(s3, caplog):
    checkpointer = make(f"{s3}/run")
    save(checkpointer, 1)
    checkpointer.dir = f"{s3}-missing/run"
    save(checkpointer, 2)
    assert isinstance(checkpointer.last_error, OSError)
    assert "NO CHECKPOINT of step 2" in caplog.text
    assert "no such object or bucket" in caplog.text
    checkpointer.dir = f"{s3}/run"
    assert checkpointer.latest_step() == 1
    checkpointer.close()


def test_a_store_that_cannot_be_reached_deletes_nothing(s3, monkeypatch, caplog):
    checkpointer = make(f"{s3}/run", keep_last_n=1)
    save(checkpointer, 1)

    with monkeypatch.context() as changed:
        changed.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        changed.setenv("AWS_MAX_ATTEMPTS", "1")
        s3fs.S3FileSystem.clear_instance_cache()
        save(checkpointer, 2)
        assert "NO CHECKPOINT of step 2" in caplog.text
        with pytest.raises(UserError, match="cannot be listed"):
            checkpointer.remove_unfinished()
    s3fs.S3FileSystem.clear_instance_cache()
    assert list_checkpoints(checkpointer.dir) == {1: step_path(checkpointer.dir, 1)}
    save(checkpointer, 2)
    assert list(list_checkpoints(checkpointer.dir)) == [2]
    checkpointer.close()


def test_copies_are_read_in_both_directions(s3, tmp_path):
    remote, local = make(f"{s3}/run"), make(tmp_path / "run")
    fs = storage.filesystem(s3)
    save(remote, 1)
    save(local, 2)
    fs.get(step_path(remote.dir, 1), step_path(local.dir, 1), recursive=True)
    fs.put(step_path(local.dir, 2), step_path(remote.dir, 2), recursive=True)
    assert_equal(local.restore(target_of(make_state()), step=1), make_state(1))
    assert_equal(remote.restore(target_of(make_state()), step=2), make_state(2))
    for each in (remote, local):
        each.close()


def test_a_store_without_arrays_is_refused():
    with pytest.raises(UserError, match=r"checkpointer\.dir is 'memory://a'"):
        writers.check_url("checkpointer.dir", "memory://a")


def test_chunks_divide_the_shard_and_fit_a_request():
    assert writers._chunks((24, 64, 2048, 1408), 4) == [1, 16, 2048, 1408]
    assert writers._chunks((3, 0), 4) == [3, 1]
    assert writers._chunks((), 4) == []
    assert writers._chunks((2, 1 << 28), 4) == [1, 1 << 26]


def test_a_deletion_that_is_cut_short_leaves_no_complete_one(s3, monkeypatch):
    checkpointer = make(f"{s3}/run")
    save(checkpointer, 1)
    checkpointer.close()

    def fail(url):
        raise OSError(f"{url}: killed")

    monkeypatch.setattr(storage, "remove_tree", fail)
    with pytest.raises(OSError, match="killed"):
        contents.delete_checkpoint(step_path(checkpointer.dir, 1))
    assert checkpointer.latest_step() is None
    assert len(arrays_of(step_path(checkpointer.dir, 1))) == 4


def test_a_process_that_cannot_write_or_is_too_slow_ends_the_save(s3, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(writers, "_SLOWEST_SECONDS", 0.2)
    storage.write_bytes(f"{s3}/done/0", b"")
    with pytest.raises(OSError, match=r"only processes \['0'\]"):
        writers._wait_for_all(f"{s3}/done")
    storage.write_bytes(f"{s3}/done/1", b"PermissionError")
    with pytest.raises(OSError, match="process 1 could not write its shards: PermissionError"):
        writers._wait_for_all(f"{s3}/done")


@pytest.mark.parametrize(
    ("module", "name", "failing", "kept"),
    [
        (checkpointer_module, "make_room", 0, [1, 3]),
        (writers, "_start_to_write", 0, [1, 3]),
        (writers, "_start_to_write", 1, [1, 3]),
        (checkpointer_module, "sync_folder", 0, [1, 3]),
    ],
)
def test_a_save_that_fails_in_one_process_fails_in_all(
    s3, monkeypatch, module, name, failing, kept
):
    real, steps = getattr(module, name), [0, 0]

    def fail(*args, **options):
        if steps[failing] == 2 and jax.process_index() == failing:
            raise OSError("planted")
        return real(*args, **options)

    def save_three(index):
        checkpointer, errors = make(f"{s3}/run"), []
        for steps[index] in (1, 2, 3):
            save(checkpointer, steps[index])
            errors.append(str(checkpointer.last_error))
        return errors

    monkeypatch.setattr(module, name, fail)
    for errors in run_as_two(monkeypatch, save_three):
        assert ["planted" in error for error in errors] == [False, True, False], errors
    assert list(list_checkpoints(f"{s3}/run")) == kept
