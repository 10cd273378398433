"""Faults: their moments, and files that they damage."""

import os
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.operations import faults
from moelib.operations.faults import Fault
from moelib.train.state import TrainerState
from tests import tiny


def test_a_fault_hits_its_process_at_its_moment():
    fault = Fault("kill", faults.STEP, 7, 1)
    assert fault.hits(1, faults.STEP, 7)
    assert not fault.hits(0, faults.STEP, 7)
    assert not fault.hits(1, faults.STEP, 6)
    assert not fault.hits(1, faults.SAVE, 7)
    assert Fault("not_a_number", faults.STEP, 7).hits(5, faults.STEP, 7)
    assert Fault("kill", faults.RESTORE, 0, 1).hits(1, faults.RESTORE, 0)


@pytest.fixture
def checkpoints(tmp_path):
    for step, size in ((4, 100), (8, 64)):
        folder = tmp_path / f"step_{step:08d}" / "state"
        folder.mkdir(parents=True)
        (folder / "large").write_bytes(bytes(size))
        (folder / "small").write_bytes(b"x")
        (folder.parent / "record").mkdir()
        (folder.parent / "record" / "metadata").touch()
    (tmp_path / "step_00000012").mkdir()  # Without a record.
    return tmp_path


def test_one_bit_of_the_newest_checkpoint_flips(checkpoints):
    faults.flip_bit_of_file(checkpoints)
    data = (checkpoints / "step_00000008" / "state" / "large").read_bytes()
    assert len(data) == 64
    assert sum(byte.bit_count() for byte in data) == 1
    assert not any((checkpoints / "step_00000004" / "state" / "large").read_bytes())


def test_the_newest_checkpoint_is_cut_short(checkpoints):
    faults.cut_file(checkpoints)
    assert (checkpoints / "step_00000008" / "state" / "large").stat().st_size == 32


def test_a_full_disk_refuses_a_file_and_is_emptied(tmp_path):
    with faults.full_disk(), pytest.raises(OSError, match="File too large"):
        (tmp_path / "x").write_bytes(bytes(2000))
    (tmp_path / "x").write_bytes(bytes(2000))
    assert os.path.getsize(tmp_path / "x") == 2000


def test_a_bit_flips_in_one_replica_only():
    mesh = tiny.mesh(data=2, fsdp=2)
    put = lambda *spec: jax.device_put(jnp.ones((4, 2)), jax.NamedSharding(mesh, jax.P(*spec)))
    state = TrainerState(0, 0, {"split": put("fsdp"), "whole": put()}, None)
    trainer = SimpleNamespace(trainer_state=state)
    faults.replica_bit(trainer)
    assert trainer._state.model["split"] is state.model["split"]
    shards = [np.asarray(shard.data) for shard in trainer._state.model["whole"].addressable_shards]
    assert [int((shard != 1).sum()) for shard in shards] == [1, 0, 0, 0]


def test_a_matrix_becomes_not_a_number():
    state = TrainerState(0, 0, {"scale": jnp.ones(3), "weight": jnp.ones((2, 2))}, None)
    trainer = SimpleNamespace(trainer_state=state)
    faults.not_a_number(trainer)
    assert trainer._state.model["scale"] is state.model["scale"]
    assert np.isnan(trainer._state.model["weight"]).all()
