"""Reading: under any mesh, all or the parameters alone, and what all processes agree on."""

import errno
import gc
import logging
import os
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.checkpoint import restore
from moelib.checkpoint.contents import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointRecord,
    DamagedCheckpointError,
    UnreadableCheckpointError,
    step_path,
)
from moelib.checkpoint.restore import (
    find_checkpoints,
    on_all_processes,
    restore_checkpoint,
    restore_params_only,
)
from moelib.core.errors import first_line
from moelib.runtime import processes
from tests.checkpoint.small import (
    DAMAGES,
    make_state,
    save,
    target_of,
    tear_record,
    truncate_arrays,
)
from tests.two_processes import run_as_two


@pytest.mark.parametrize("num_devices", [8, 4, 1])
def test_read_under_another_mesh(checkpointer, num_devices):
    state = jax.device_put(
        make_state(3), jax.tree.map(lambda t: t.sharding, target_of(make_state()))
    )
    save(
        checkpointer,
        3,
        state,
        input={"step": 3, "b": 1, "a": 2},
        metrics={"val/loss": 1.5},
        mesh={"data": 8},
    )
    target = target_of(state, num_devices)
    restored = restore_checkpoint(step_path(checkpointer.dir, 3), target)
    jax.tree.map(np.testing.assert_array_equal, restored.state, state)
    assert jax.tree.map(lambda x: x.sharding, restored.state) == jax.tree.map(
        lambda x: x.sharding, target
    )
    assert list(restored.record.input.items()) == [("step", 3), ("b", 1), ("a", 2)]
    assert restored.record.metrics == {"val/loss": 1.5}
    assert restored.record.mesh == {"data": 8}
    assert restored.record.versions["jax"] == jax.__version__
    assert restored.path == step_path(checkpointer.dir, 3)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_one_is_refused_by_its_path(checkpointer, damage):
    save(checkpointer, 1)
    path = step_path(checkpointer.dir, 1)
    damage(path)
    with pytest.raises(DamagedCheckpointError, match=rf"{path}.* cannot be read"):
        restore_checkpoint(path, target_of(make_state()))


def test_arrays_that_were_read_before_a_damaged_one_are_freed(checkpointer, monkeypatch):
    save(checkpointer, 1)
    path = step_path(checkpointer.dir, 1)
    real = jax.make_array_from_callback
    read = []

    def fail_at_the_last(*args):
        array = real(*args)
        read.append(weakref.ref(array))
        if len(read) == 4:
            raise ValueError("damaged")
        return array

    monkeypatch.setattr(jax, "make_array_from_callback", fail_at_the_last)
    gc.disable()
    try:
        with pytest.raises(DamagedCheckpointError, match=rf"{path} cannot .*damaged"):
            restore_checkpoint(path, target_of(make_state()))
        assert [ref() for ref in read] == [None] * 4
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"w": jnp.zeros((8, 4)), "b": jnp.ones(3, jnp.bfloat16)},
            r"'model/w'.*float32\[8, 8\].*float32\[8, 4\]",
        ),
        ({"w": jnp.zeros((8, 8)), "c": jnp.ones(3)}, r"'model/c'.*float32\[3\]\).*'model/b'"),
        ({"w": jnp.zeros((8, 8))}, r"'model/b', bfloat16\[3\]"),
    ],
)
def test_checkpoint_of_another_config_names_the_first_path(checkpointer, change, message):
    save(checkpointer, 1)
    path = step_path(checkpointer.dir, 1)
    with pytest.raises(CheckpointMismatchError, match=message):
        restore_checkpoint(path, target_of({**make_state(), "model": change}))


def test_parameters_alone_also_of_a_relative_path(checkpointer, monkeypatch):
    save(checkpointer, 4)
    state = make_state(4)
    restored = restore_params_only(checkpointer.dir, target_of(state["model"], 2))
    jax.tree.map(np.testing.assert_array_equal, restored.state, state["model"])
    shapes = jax.eval_shape(lambda: state["model"])
    folder, name = os.path.split(checkpointer.dir)
    monkeypatch.chdir(folder)
    restored = restore_params_only(name, shapes, step=4)
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


def test_parameters_of_nothing_are_refused(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match=str(tmp_path)):
        restore_params_only(str(tmp_path), {})


@pytest.mark.parametrize("num_devices", [4, None])
def test_parameters_have_the_targets_sharding_or_one_device(checkpointer, num_devices):
    model = make_state()["model"] | {"scale": jnp.float32(2)}
    save(checkpointer, 4, make_state(4) | {"model": model})
    target = target_of(model, num_devices) if num_devices else jax.eval_shape(lambda: model)
    restored = restore_params_only(checkpointer.dir, target).state
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for name, value in restored.items():
        assert value.sharding == (target[name].sharding or one), name


def test_average_of_other_sizes_is_not_taken(checkpointer):
    model = {"w": jnp.ones((2, 2))}
    learner = {"ema": {"params": {"w": jnp.zeros(4)}}}
    save(checkpointer, 1, {"model": model, "learner": learner})
    restored = restore_params_only(checkpointer.dir, jax.eval_shape(lambda: model)).state
    np.testing.assert_array_equal(restored["w"], model["w"])


def test_parameters_of_another_model_are_refused(checkpointer):
    save(checkpointer, 4)
    shapes = jax.eval_shape(lambda: make_state()["model"] | {"w": jnp.zeros((8, 4))})
    with pytest.raises(
        CheckpointMismatchError, match=r"step_00000004: 'w'.*float32\[8, 8\].*float32\[8, 4\]"
    ):
        restore_params_only(checkpointer.dir, shapes)


def test_parameters_of_a_step_that_is_missing_are_refused(checkpointer):
    save(checkpointer, 4)
    save(checkpointer, 6)
    with pytest.raises(CheckpointNotFoundError, match="step 7"):
        restore_params_only(checkpointer.dir, {}, step=7)


def test_parameters_are_those_of_the_newest_that_is_sound(checkpointer, caplog):
    for step in (1, 2):
        save(checkpointer, step)
    truncate_arrays(step_path(checkpointer.dir, 2))
    shapes = jax.eval_shape(lambda: make_state()["model"])
    with caplog.at_level(logging.WARNING):
        restored = restore_params_only(checkpointer.dir, shapes)
    assert restored.record.step == 1
    np.testing.assert_array_equal(restored.state["w"], make_state(1)["model"]["w"])
    assert "Damaged checkpoint" in caplog.text
    assert "step_00000002" in caplog.text
    with pytest.raises(DamagedCheckpointError, match=r"is damaged:\n  .*step_00000002") as caught:
        restore_params_only(checkpointer.dir, shapes, step=2)
    assert "step_00000001" not in str(caught.value)
    tear_record(step_path(checkpointer.dir, 1))
    with pytest.raises(DamagedCheckpointError, match=r"(?s)step_00000002.*\n  .*step_00000001"):
        restore_params_only(checkpointer.dir, shapes)


def test_nothing_but_the_parameters_is_read(checkpointer, monkeypatch):
    save(checkpointer, 4)
    asked = []
    read = restore._read
    monkeypatch.setattr(
        restore, "_read", lambda *args, **kw: asked.append(args) or read(*args, **kw)
    )
    restore_params_only(checkpointer.dir, jax.eval_shape(lambda: make_state()["model"]))
    assert [(args[1].keys(), args[1]["model"].keys()) for args in asked] == [
        ({"model"}, {"w", "b"})
    ]


def empty_checkpoint(folder, step):
    record = CheckpointRecord(step, arrays={}, checksums={}, versions={})
    record.write(step_path(str(folder), step))


@pytest.mark.parametrize(
    ("step", "steps", "message"),
    [
        (None, [], "no checkpoint; the folder has none"),
        (7, [], "no checkpoint of step 7; the folder has none"),
        (0, [5, 2], "no checkpoint of step 0; there are steps 2, 5"),
    ],
)
def test_a_missing_checkpoint_is_named_with_those_that_exist(tmp_path, step, steps, message):
    for number in steps:
        empty_checkpoint(tmp_path, number)
    (tmp_path / "step_²").mkdir()  # Not a number.
    with pytest.raises(CheckpointNotFoundError, match=f"{tmp_path}: {message}"):
        find_checkpoints(str(tmp_path), step, required=True)
    assert list(find_checkpoints(str(tmp_path))) == sorted(steps)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("\n  one\ntwo"), "ValueError: one"),
        (KeyError(), "KeyError: "),
        (OSError("x" * 500), "OSError: " + "x" * 400),
    ],
)
def test_first_line_of_an_error(error, line):
    assert first_line(error) == line


def test_all_processes_take_the_checkpoints_that_process_0_sees(tmp_path, monkeypatch):
    empty_checkpoint(tmp_path, 3)  # This process sees another folder than process 0.
    monkeypatch.setattr(restore, "gather_json", lambda mine: [[0, 4], mine])
    directory = str(tmp_path)
    assert find_checkpoints(directory) == {step: step_path(directory, step) for step in (0, 4)}


def test_an_error_of_the_system_is_not_damage_on_any_process(monkeypatch):
    failures = [PermissionError(errno.EACCES, "Permission denied"), DamagedCheckpointError("cut")]

    def read(index):
        return on_all_processes(lambda: (_ for _ in ()).throw(failures[index]), "step_5")

    found = run_as_two(monkeypatch, read)
    assert [type(each) for each in found] == [UnreadableCheckpointError] * 2
    assert found[0].__cause__ is failures[0]
    assert all(re.search("step_5.*Permission denied", str(each)) for each in found)


def test_record_is_read_inside_the_agreement(checkpointer, monkeypatch):
    save(checkpointer, 1)
    tear_record(step_path(checkpointer.dir, 1))
    gathered = []
    monkeypatch.setattr(processes, "gather_json", lambda mine: gathered.append(mine) or [mine])
    with pytest.raises(DamagedCheckpointError):
        checkpointer.restore(target_of(make_state()))
    # Reading the folder, the steps known to be damaged, which are none, and the record.
    assert [each[0] for each in gathered if each] == [0, 0, 1]
