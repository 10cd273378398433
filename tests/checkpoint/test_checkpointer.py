"""Checkpoints: what is written is read, under any mesh; damage, other configs and full disks."""

import errno
import logging
import os
import resource
import signal
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from moelib.checkpoint import contents, restore
from moelib.checkpoint.checkpointer import Checkpointer
from moelib.checkpoint.contents import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointRecord,
    DamagedCheckpointError,
    latest_checkpoint,
    list_checkpoints,
    step_path,
)
from moelib.checkpoint.restore import on_all_processes, restore_params_only


class Empty(NamedTuple):
    """As Optax has them."""


def make_state(scale=1.0):
    w = scale * jnp.arange(64, dtype=jnp.float32).reshape(8, 8)
    return {
        "step": jnp.int32(3),
        "model": {"w": w, "b": jnp.ones(3, jnp.bfloat16)},
        "learner": (Empty(), [w + 1], None),
    }


def target_of(state, num_devices=8):
    mesh = jax.make_mesh((num_devices,), ("data",), devices=jax.devices()[:num_devices])

    def target(x):
        spec = PartitionSpec("data") if x.shape == (8, 8) else PartitionSpec()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(target, state)


def make(directory, **settings):
    return (
        Checkpointer.default_config().set(dir=str(directory), **settings).instantiate(parent=None)
    )


def save(checkpointer, step, state=None, **record):
    state = make_state(step) if state is None else state
    checkpointer.save(state, CheckpointRecord(step=step, arrays={}, **record))
    checkpointer.wait()


@pytest.fixture
def checkpointer(tmp_path):
    checkpointer = make(tmp_path)
    yield checkpointer
    checkpointer.close()


@pytest.mark.parametrize("num_devices", [8, 4, 1])
def test_read_under_another_mesh(checkpointer, num_devices):
    state = jax.device_put(
        make_state(), jax.tree.map(lambda t: t.sharding, target_of(make_state()))
    )
    save(checkpointer, 3, state, input={"step": 3}, metrics={"val/loss": 1.5}, mesh={"data": 8})
    target = target_of(state, num_devices)
    restored = checkpointer.restore(target)
    jax.tree.map(np.testing.assert_array_equal, restored.state, state)
    assert jax.tree.map(lambda x: x.sharding, restored.state) == jax.tree.map(
        lambda x: x.sharding, target
    )
    assert restored.record.input == {"step": 3}
    assert restored.record.metrics == {"val/loss": 1.5}
    assert restored.record.mesh == {"data": 8}
    assert restored.record.versions["jax"] == jax.__version__
    assert restored.path == latest_checkpoint(checkpointer.dir)


def test_nothing_there_is_none(checkpointer):
    assert checkpointer.restore(target_of(make_state())) is None
    assert checkpointer.latest_step() is None
    assert latest_checkpoint(checkpointer.dir) is None


def test_old_ones_are_dropped(tmp_path):
    metrics = {2: 5.0, 4: 1.0, 6: 3.0, 8: 4.0}
    checkpointer = make(
        tmp_path, keep_last_n=1, keep_every_n_steps=6, keep_best_n=1, best_metric="val/loss"
    )
    for step, value in metrics.items():
        save(checkpointer, step, metrics={"val/loss": value})
    checkpointer.close()
    assert list(list_checkpoints(tmp_path)) == [4, 6, 8]


def test_best_without_a_metric_is_refused(tmp_path):
    with pytest.raises(ValueError, match="keep_best_n is 1; set best_metric to"):
        make(tmp_path, keep_best_n=1)


def truncate_arrays(path):
    for folder, _, names in os.walk(os.path.join(path, "state")):
        for name in names:
            if folder.endswith(os.sep + "d"):
                os.truncate(os.path.join(folder, name), 10)


def remove_record(path):
    os.remove(os.path.join(path, "record", "metadata"))


def tear_record(path):
    os.truncate(os.path.join(path, "record", "metadata"), 10)


def remove_state(path):
    for folder, _, names in os.walk(os.path.join(path, "state")):
        for name in names:
            os.remove(os.path.join(folder, name))


@pytest.mark.parametrize("damage", [truncate_arrays, remove_record, tear_record, remove_state])
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
    ValueError("PERMISSION_DENIED: Failed to open [os_error_code='13']"),
    RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes"),
]


@pytest.mark.parametrize("error", UNREADABLE, ids=repr)
@pytest.mark.parametrize("place", ["record", "arrays"])
def test_what_says_nothing_of_the_checkpoint_is_raised_as_it_is(
    checkpointer, monkeypatch, error, place
):
    save(checkpointer, 1)
    save(checkpointer, 2)

    def fail(*args, **kwargs):
        raise error

    if place == "arrays":
        monkeypatch.setattr(ocp.Checkpointer, "restore", fail)
    else:
        monkeypatch.setattr(contents.json, "load", fail)
    with pytest.raises(type(error)) as caught:
        checkpointer.restore(target_of(make_state()))
    assert caught.value is error
    assert checkpointer.latest_step() == 2


def test_file_that_the_system_does_not_open_is_no_damage(checkpointer):
    save(checkpointer, 1)
    save(checkpointer, 2)
    for folder, _, names in os.walk(os.path.join(step_path(checkpointer.dir, 2), "state")):
        for name in names if folder.endswith(os.sep + "d") else ():
            os.remove(os.path.join(folder, name))
            os.symlink(name, os.path.join(folder, name))  # To itself: ELOOP.
    with pytest.raises(Exception, match="Too many levels of symbolic links"):
        checkpointer.restore(target_of(make_state()))
    assert checkpointer.latest_step() == 2


def test_record_that_cannot_be_read_drops_no_checkpoint(tmp_path, monkeypatch, caplog):
    checkpointer = make(tmp_path, keep_last_n=1)
    save(checkpointer, 1)
    monkeypatch.setattr(contents.json, "load", lambda file: (_ for _ in ()).throw(UNREADABLE[1]))
    save(checkpointer, 2)
    checkpointer.close()
    assert list(list_checkpoints(tmp_path)) == [1, 2]
    assert "No old checkpoint is dropped: [Errno 5] Input/output error" in caplog.text


@pytest.mark.parametrize(
    ("theirs", "error"),
    [
        (0, CheckpointMismatchError),
        (1, CheckpointMismatchError),
        (2, CheckpointMismatchError),
        (3, RuntimeError),
    ],
)
def test_processes_agree_before_one_fails(monkeypatch, theirs, error):
    def gather(mine):
        return np.array([mine, theirs])

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    mismatch = CheckpointMismatchError("other sizes")
    with pytest.raises(error) as caught:
        on_all_processes(lambda: (_ for _ in ()).throw(mismatch), "place")
    assert (caught.value is mismatch) == (theirs < 3)
    if theirs == 0:
        assert on_all_processes(lambda: 5, "place") == 5
    if theirs == 1:
        with pytest.raises(DamagedCheckpointError, match="cannot be read by another process"):
            on_all_processes(lambda: 5, "place")


def test_record_is_read_inside_the_agreement(checkpointer, monkeypatch):
    save(checkpointer, 1)
    remove_record(step_path(checkpointer.dir, 1))
    agreed = []
    monkeypatch.setattr(restore, "_worst", lambda verdict: agreed.append(verdict) or verdict)
    with pytest.raises(DamagedCheckpointError):
        checkpointer.restore(target_of(make_state()))
    assert agreed == [0, 1]  # The list, the record.


def test_all_damaged_is_an_error(checkpointer):
    save(checkpointer, 1)
    truncate_arrays(step_path(checkpointer.dir, 1))
    with pytest.raises(
        DamagedCheckpointError,
        match=r"(?s)every checkpoint is damaged.*step_00000001.*Move .* aside",
    ):
        checkpointer.restore(target_of(make_state()))


def test_step_that_is_missing_is_named(checkpointer):
    save(checkpointer, 5)
    assert checkpointer.restore(target_of(make_state()), step=5).record.step == 5
    with pytest.raises(
        CheckpointNotFoundError, match=r"no checkpoint of step 7; there are steps 5"
    ):
        checkpointer.restore(target_of(make_state()), step=7)


def test_unfinished_one_is_not_seen_and_removed(checkpointer, tmp_path):
    save(checkpointer, 5)
    unfinished = tmp_path / "step_00000009.orbax-checkpoint-tmp"
    unfinished.mkdir()
    assert checkpointer.latest_step() == 5
    checkpointer.remove_unfinished()
    assert not unfinished.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"w": jnp.zeros((8, 4)), "b": jnp.ones(3, jnp.bfloat16)},
            r"'model/w' is float32\[8, 8\] in the checkpoint, and float32\[8, 4\] in this run",
        ),
        (
            {"w": jnp.zeros((8, 8)), "c": jnp.ones(3)},
            r"no array 'model/c' \(wanted: float32\[3\]\); did you mean 'model/b'",
        ),
        ({"w": jnp.zeros((8, 8))}, r"has an array 'model/b', bfloat16\[3\], that this run has not"),
    ],
)
def test_checkpoint_of_another_config_names_the_first_path(checkpointer, change, message):
    save(checkpointer, 1)
    with pytest.raises(CheckpointMismatchError, match=message):
        checkpointer.restore(target_of({**make_state(), "model": change}))


def test_full_disk_is_said_and_the_older_one_stays(checkpointer, caplog):
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
    assert "NO CHECKPOINT of step 2" in caplog.text
    assert "Training goes on. Step 1 is the newest there is." in caplog.text
    assert checkpointer.last_error is not None
    assert os.listdir(checkpointer.dir) == ["step_00000001"]
    save(checkpointer, 3)
    assert checkpointer.last_error is None
    assert checkpointer.restore(target_of(make_state())).record.step == 3


def test_folder_that_cannot_be_written_is_said(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    checkpointer = make(tmp_path / "file" / "checkpoints")
    save(checkpointer, 2)
    assert "NO CHECKPOINT of step 2" in caplog.text
    assert "There is no older one." in caplog.text


def test_parameters_alone_also_of_a_relative_path(checkpointer, monkeypatch):
    save(checkpointer, 4)
    state = make_state(4)
    folder, name = os.path.split(checkpointer.dir)
    monkeypatch.chdir(folder)
    shapes = jax.eval_shape(lambda: state["model"])
    jax.tree.map(
        np.testing.assert_array_equal, restore_params_only(name, shapes).state, state["model"]
    )


def test_parameters_alone(checkpointer):
    save(checkpointer, 4)
    state = make_state(4)
    restored = restore_params_only(checkpointer.dir, target_of(state["model"], 2))
    jax.tree.map(np.testing.assert_array_equal, restored.state, state["model"])
    shapes = jax.eval_shape(lambda: state["model"])
    restored = restore_params_only(checkpointer.dir, shapes, step=4)
    jax.tree.map(np.testing.assert_array_equal, restored.state, state["model"])


def test_parameters_alone_are_the_average_if_there_is_one(checkpointer):
    model = {"w": jnp.ones((2, 2), jnp.bfloat16), "count": jnp.ones(2)}
    average = {"w": jnp.full((2, 2), 0.5, jnp.float32)}
    save(checkpointer, 1, {"model": model, "learner": {"ema": {"params": average}}})
    shapes = jax.eval_shape(lambda: model)
    restored = restore_params_only(checkpointer.dir, shapes).state
    assert restored["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(restored["w"], average["w"])
    np.testing.assert_array_equal(restored["count"], model["count"])
    restored = restore_params_only(checkpointer.dir, shapes, average=False).state
    np.testing.assert_array_equal(restored["w"], model["w"])


def test_parameters_of_nothing_are_refused(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint; the folder has none"):
        restore_params_only(str(tmp_path), {})
