"""Damaged checkpoints: none is read as if it were sound."""

import json
import logging
import os
import shutil

import jax
import numpy as np
import pytest

from benchmarks import corruption
from moelib.checkpoint import contents
from moelib.checkpoint.contents import CheckpointRecord, DamagedCheckpointError, step_path
from moelib.checkpoint.restore import restore_checkpoint, restore_params_only
from tests.checkpoint.small import make, make_state, save, target_of


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    return corruption.checkpoint(str(tmp_path_factory.mktemp("sound") / "checkpoints"))


@pytest.mark.parametrize("damage", corruption.DAMAGES)
def test_no_random_corruption_is_read_silently(subject, tmp_path, caplog, damage):
    for seed in range(2):
        caplog.clear()
        outcome = corruption.outcome_of(subject, damage, seed, str(tmp_path))
        assert outcome in (corruption.EXACT, corruption.OLDER, corruption.ERROR), seed
        warnings = [x.getMessage() for x in caplog.records if x.levelno >= logging.WARNING]
        assert len(warnings) <= (outcome == corruption.OLDER)  # None without its record.
        assert all("step_00000003" in each and "\n" not in each for each in warnings)


@pytest.mark.slow
def test_none_of_1000_corruptions_is_read_silently(subject, tmp_path):
    rows = corruption.table("checkpoint", subject, 1000, str(tmp_path)).rows
    assert rows[-1][-2:] == ("0", "0")


def test_every_flipped_bit_of_a_record_is_damage(subject, tmp_path):
    path = os.path.join(tmp_path, "step_00000003")
    shutil.copytree(os.path.join(subject.folder, "step_00000003", "record"), f"{path}/record")
    file = f"{path}/record/metadata"
    with open(file, "rb") as f:
        sound = f.read()
    record = CheckpointRecord.read(path)
    for offset in range(0, len(sound), 3):
        for bit in range(8):
            damaged = bytearray(sound)
            damaged[offset] ^= 1 << bit
            with open(file, "wb") as f:
                f.write(damaged)
            try:
                assert CheckpointRecord.read(path) == record  # White space.
            except DamagedCheckpointError:
                continue


# -- Damages that a test has to choose -----------------------------------------------------------


def exchange(checkpointer, item):
    """Exchanges an item of the checkpoints of steps 1 and 2."""
    one, two = (os.path.join(step_path(checkpointer.dir, step), item) for step in (1, 2))
    os.rename(one, f"{one}.other")
    os.rename(two, one)
    os.rename(f"{one}.other", two)


@pytest.mark.parametrize("item", ["record", "state"])
def test_parts_of_another_checkpoint_are_damage(checkpointer, item):
    for step in (0, 1, 2):
        save(checkpointer, step)
    exchange(checkpointer, item)
    assert checkpointer.restore(target_of(make_state())).record.step == 0


def test_renamed_checkpoint_is_damage(checkpointer, caplog):
    save(checkpointer, 1)
    save(checkpointer, 2)
    os.rename(step_path(checkpointer.dir, 2), step_path(checkpointer.dir, 999))
    assert checkpointer.restore(target_of(make_state())).record.step == 1
    assert "step_00000999" in caplog.text
    assert "record of step 2" in caplog.text


def with_another_checksum(checkpointer, name):
    """Gives a checkpoint of step 1 whose array `name` differs from its checksum."""
    save(checkpointer, 1)
    path = step_path(checkpointer.dir, 1)
    record = CheckpointRecord.read(path)
    record.checksums[name] = "0" * 16
    record.write(path)
    return path


def test_array_that_differs_from_its_checksum_is_named(checkpointer):
    path = with_another_checksum(checkpointer, "model/w")
    with pytest.raises(DamagedCheckpointError, match=rf"{path}: 'model/w'"):
        restore_checkpoint(path, target_of(make_state()))
    with pytest.raises(DamagedCheckpointError, match="'model/w'"):
        restore_params_only(checkpointer.dir, target_of(make_state()["model"]))


def test_checksums_of_arrays_that_are_not_read_are_not_compared(checkpointer):
    with_another_checksum(checkpointer, "learner/1/0")
    restored = restore_params_only(checkpointer.dir, target_of(make_state()["model"]))
    jax.tree.map(np.testing.assert_array_equal, restored.state, make_state(1)["model"])


def test_skipped_checksums_are_not_compared(checkpointer):
    path = with_another_checksum(checkpointer, "model/w")
    target = target_of(make_state())
    assert restore_checkpoint(path, target, skip_checksums=True).record.step == 1
    model = target["model"]
    assert restore_params_only(checkpointer.dir, model, skip_checksums=True).record.step == 1
    assert make(checkpointer.dir, skip_checksums=True).restore(target).record.step == 1


def test_values_that_compare_equal_are_stored_bit_for_bit(checkpointer):
    """Zeros of both signs and NaN with payloads: the storage must not take one for another."""
    bits = np.array([0, 1 << 31, 0x7FC00001, 0xFFC12345, 0x7F800001], np.uint32)
    state = {"zeros": np.full(64, -0.0, np.float32), "all": bits.view(np.float32)}
    save(checkpointer, 1, jax.tree.map(jax.numpy.asarray, state))
    restored = checkpointer.restore(target_of(state)).state
    for name, x in state.items():
        np.testing.assert_array_equal(np.asarray(restored[name]).view(np.uint32), x.view(np.uint32))


# -- Messages and listing ------------------------------------------------------------------------


def test_names_that_are_no_steps_are_not_listed(tmp_path):
    for name in ("step_²", "step_", "step_-1", "step_1e3", "step_" + "9" * 200, "step_00000007"):
        contents.CheckpointRecord(7, arrays={}, checksums={}, versions={}).write(tmp_path / name)
    assert list(contents.list_checkpoints(str(tmp_path))) == [7]


@pytest.mark.parametrize("kind", ["file", "link to itself", "link to nothing"])
def test_something_else_at_the_path_of_a_checkpoint_is_replaced(checkpointer, kind):
    save(checkpointer, 1)
    path = step_path(checkpointer.dir, 2)
    if kind == "file":
        open(path, "w").close()
    else:
        os.symlink(path if kind == "link to itself" else "nothing", path)
    assert checkpointer.restore(target_of(make_state())).record.step == 1
    save(checkpointer, 2)
    assert checkpointer.restore(target_of(make_state())).record.step == 2


def test_folder_that_is_a_link_to_itself_is_refused(tmp_path):
    link = tmp_path / "checkpoints"
    link.symlink_to(link)
    with pytest.raises(ValueError, match=f"{link} cannot be listed"):
        make(link).restore(target_of(make_state()))


@pytest.mark.parametrize("missing", [["digest"], ["digest", "checksums"]])
def test_a_record_with_a_config_needs_its_digest_and_checksums(checkpointer, caplog, missing):
    save(checkpointer, 1)
    save(checkpointer, 2, config="max_step: 2")
    file = os.path.join(step_path(checkpointer.dir, 2), "record", "metadata")
    with open(file, encoding="utf-8") as f:
        values = json.load(f)
    for name in missing:
        del values[name]
    values["metrics"] = {"loss": 0.5}
    with open(file, "w", encoding="utf-8") as f:
        json.dump(values, f)
    assert checkpointer.restore(target_of(make_state())).record.step == 1
    assert "digest" in caplog.text
