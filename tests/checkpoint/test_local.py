"""Local checkpoints: what is written, on which meshes it is read, and what is not used."""

import logging
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.checkpoint import local as local_module
from moelib.checkpoint.contents import RunRecord, list_checkpoints, step_path
from moelib.core import tree
from moelib.core.errors import UserError
from tests.checkpoint.small import make, make_state, save, target_of


def sharded(state, num_devices=8):
    return jax.tree.map(
        lambda x, like: jax.device_put(x, like.sharding), state, target_of(state, num_devices)
    )


@pytest.fixture
def checkpointer(tmp_path):
    checkpointer = make(tmp_path / "run", local_dir=str(tmp_path / "local"), local_every_n_steps=2)
    yield checkpointer
    checkpointer.close()


def save_locally(checkpointer, step, state=None, **record):
    state = sharded(make_state(step)) if state is None else state
    checkpointer.save_locally(state, RunRecord(step=step, **record))
    checkpointer.local.wait()


def folders(tmp_path):
    [own] = (tmp_path / "local").glob("*/process_0000")
    return list(list_checkpoints(own).values())


@pytest.mark.parametrize("num_devices", [8, 4, 2])
def test_newest_is_read_on_any_mesh_bit_for_bit(checkpointer, num_devices):
    save(checkpointer, 1)
    save_locally(checkpointer, 2, input={"step": 2}, metrics={"val/loss": float("nan")})
    restored = checkpointer.restore(target_of(make_state(), num_devices))
    assert (restored.record.step, restored.record.input) == (2, {"step": 2})
    want, got = tree.by_path(make_state(2)), tree.by_path(restored.state)
    assert want.keys() == got.keys()
    for name, x in want.items():
        assert got[name].dtype == x.dtype
        assert np.asarray(got[name]).tobytes() == np.asarray(x).tobytes()


def test_array_is_put_together_of_parts_of_other_sizes(checkpointer):
    save_locally(checkpointer, 2, sharded(make_state(2), 2))
    restored = checkpointer.restore(target_of(make_state(), 8))
    np.testing.assert_array_equal(restored.state["model"]["w"], make_state(2)["model"]["w"])


def test_durable_one_of_the_same_step_or_later_is_read(checkpointer, tmp_path):
    save_locally(checkpointer, 2)
    save(checkpointer, 2)
    assert checkpointer.restore(target_of(make_state())).path.startswith(str(tmp_path / "run"))
    assert not list((tmp_path / "local").glob("*"))  # It is not needed any more.


def test_requested_step_is_a_durable_one(checkpointer):
    save(checkpointer, 1)
    save_locally(checkpointer, 2)
    assert checkpointer.restore(target_of(make_state()), step=1).record.step == 1


def test_none_is_used_if_the_durable_one_before_was_moved_away(checkpointer, tmp_path):
    save(checkpointer, 1)
    save_locally(checkpointer, 4)  # While the durable one of step 3 is written.
    save(checkpointer, 3)
    save_locally(checkpointer, 6)
    os.rename(step_path(checkpointer.dir, 3), tmp_path / "aside")
    assert checkpointer.restore(target_of(make_state())).record.step == 1


def test_a_disk_that_fails_is_logged_and_durable_ones_are_read(checkpointer, caplog, monkeypatch):
    save_locally(checkpointer, 2)
    with monkeypatch.context() as patch:
        patch.setattr(local_module, "list_checkpoints", _fail_to_list)
        save_locally(checkpointer, 4)
        save(checkpointer, 3)
        checkpointer.local.delete_after(3)
        assert checkpointer.restore(target_of(make_state())).record.step == 3
    assert caplog.text.count("Input/output error") == 4
    save_locally(checkpointer, 6)
    assert checkpointer.restore(target_of(make_state())).record.step == 6


def test_last_two_are_kept_and_the_one_being_written(checkpointer, tmp_path):
    for step in range(2, 12, 2):
        save_locally(checkpointer, step)
    assert [int(path[-8:]) for path in folders(tmp_path)] == [6, 8, 10]
    assert checkpointer.complete_step == 10


def test_due_steps_are_multiples_and_none_without_a_folder(checkpointer, tmp_path):
    assert [x for x in range(1, 7) if checkpointer.should_save_locally(step=x)] == [2, 4, 6]
    assert not make(tmp_path).should_save_locally(step=20)
    with pytest.raises(ValueError, match="local_every_n_steps=0"):
        make(tmp_path, local_dir=str(tmp_path), local_every_n_steps=0)
    with pytest.raises(ValueError, match=r"local_every_n_steps=2; set local_dir"):
        make(tmp_path, local_every_n_steps=2)
    with pytest.raises(ValueError, match=r"local_dir is 's3://bucket/x'"):
        make(tmp_path, local_dir="s3://bucket/x")


def flip(path):
    content = bytearray((file := path / "shards.bin").read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES = [
    flip,
    lambda path: os.truncate(path / "shards.bin", 10),
    lambda path: os.truncate(path / "shards.json", 10),
    lambda path: (path / "shards.json").write_text('{"step": [[[0], [1], 1e9]]}'),
    lambda path: os.remove(path / "shards.bin"),
    lambda path: os.truncate(path / "record/metadata", 10),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=range(len(DAMAGES)))
def test_damaged_one_is_not_used(checkpointer, tmp_path, caplog, damage):
    save(checkpointer, 1)
    save_locally(checkpointer, 2)
    save_locally(checkpointer, 4)
    damage(type(tmp_path)(folders(tmp_path)[1]))
    restored = checkpointer.restore(target_of(make_state()))
    assert restored.record.step == 2
    assert "step 4 is not used" in caplog.text


def test_shards_of_a_lost_process_are_missed(checkpointer, tmp_path, caplog):
    save(checkpointer, 1)
    save_locally(checkpointer, 2)
    index = (path := type(tmp_path)(folders(tmp_path)[0]) / "shards.json").read_text()
    path.write_text(index.replace("[[0, 0], [1, 8], ", "[[1, 0], [1, 8], "))
    assert checkpointer.restore(target_of(make_state())).record.step == 1
    assert "are on other hosts" in caplog.text


def test_other_arrays_are_not_used(checkpointer, caplog):
    save_locally(checkpointer, 2)
    target = target_of({**make_state(), "more": jnp.ones(3)})
    assert checkpointer.restore(target) is None
    assert "'more'" in caplog.text


def test_run_that_begins_again_in_an_emptied_folder_reads_nothing_of_the_other(tmp_path):
    settings = {"local_dir": str(tmp_path / "local"), "local_every_n_steps": 2}
    first = make(tmp_path / "run", **settings)
    save_locally(first, 2)
    os.rename(tmp_path / "run", tmp_path / "moved")
    second = make(tmp_path / "run", **settings)
    assert second.restore(target_of(make_state())) is None
    save_locally(second, 4)
    assert [int(path[-8:]) for path in folders(tmp_path)] == [4]


def test_full_disk_is_logged_and_the_next_one_written(checkpointer, tmp_path, caplog, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(local_module, "_write_shards", _fail)
        save_locally(checkpointer, 2)
    assert [x.levelno for x in caplog.records] == [logging.ERROR]
    assert "step 2" in caplog.text
    save_locally(checkpointer, 4)
    assert checkpointer.restore(target_of(make_state())).record.step == 4


def test_remains_of_killed_processes_are_deleted(checkpointer, tmp_path):
    save_locally(checkpointer, 2)
    own = os.path.dirname(folders(tmp_path)[0])
    os.makedirs(f"{own}/step_00000008/record")
    os.makedirs(os.path.join(os.path.dirname(own), "process_0007", "step_00000002"))
    save_locally(checkpointer, 4)
    assert sorted(os.listdir(own)) == ["step_00000002", "step_00000004"]
    assert os.listdir(os.path.dirname(own)) == ["process_0000"]


def test_steps_after_a_restore_are_deleted_in_the_folders_of_all_processes(checkpointer, tmp_path):
    save_locally(checkpointer, 2)
    save_locally(checkpointer, 4)
    own = os.path.dirname(folders(tmp_path)[0])
    os.rename(own, os.path.join(os.path.dirname(own), "process_0001"))  # Of another rank.
    checkpointer.local.delete_after(2)
    assert checkpointer.restore(target_of(make_state())).record.step == 2
    assert checkpointer.complete_step == 2


def test_names_of_local_checkpoints_of_a_remote_run_depend_on_no_current_folder(tmp_path):
    local = local_module.LocalCheckpoints(str(tmp_path), "s3://bucket/run/checkpoints")
    local._id = lambda create: "1"
    assert local._own_dir().endswith("-1/process_0000")
    assert str(tmp_path) in local._own_dir()


def test_disk_of_the_run_that_is_full_is_logged(checkpointer, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(local_module, "write_json", _fail)
    save_locally(checkpointer, 2)
    assert "NO LOCAL CHECKPOINT of step 2" in caplog.text


def _fail_to_list(folder):
    raise UserError(f"{folder} cannot be read: Input/output error")


def _fail(*args):
    raise OSError(28, "No space left on device")
