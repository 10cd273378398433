"""Whose folder it is: what of a config may change on the way, and what may not."""

import pathlib

import pytest

from moelib.layers.moe.dispatch import SortedDispatcher
from moelib.layers.moe.dispatch_capacity import CapacityDispatcher
from moelib.layers.moe.dispatch_ragged import RaggedDispatcher
from moelib.layers.moe.layer import MoELayer
from moelib.train.identity import (
    TrainerDirConflictError,
    claim_directory,
    config_hash,
    identity,
)
from tests import tiny


def changed(path, value):
    cfg = tiny.trainer_config("somewhere")
    cfg.set_recursively(path, value=value)
    return cfg


MAY_CHANGE = [
    ("max_step", 99),
    ("mesh_shape", (1, 1, 1, 8, 1, 1)),
    ("log_every_n_steps", 7),
    ("checkpointer.keep_last_n", 9),
    ("train_dtype", "bfloat16"),
    ("num_microbatches", 2),
]
MAY_NOT = [
    ("model.dim", 24, "model.dim is 16 there, and 24 in this config"),
    ("prng_seed", 3, "prng_seed is 0 there, and 3"),
    ("input.seq_len", 32, "input.seq_len is 16 there"),
    ("learner.optimizer.b1", 0.5, r"learner.optimizer.b1 is 0\.9 there"),
]


@pytest.mark.parametrize(("path", "value"), MAY_CHANGE)
def test_what_may_change(tmp_path, path, value):
    claim_directory(tiny.trainer_config("somewhere"), str(tmp_path))
    file = claim_directory(changed(path, value), str(tmp_path))
    text = pathlib.Path(file).read_text(encoding="utf-8")
    assert text == changed(path, value).debug_string()
    assert config_hash(changed(path, value)) == config_hash(tiny.trainer_config("elsewhere"))


@pytest.mark.parametrize(("path", "value", "message"), MAY_NOT)
def test_what_may_not(tmp_path, path, value, message):
    claim_directory(tiny.trainer_config("somewhere"), str(tmp_path))
    with pytest.raises(TrainerDirConflictError, match=rf"belongs to another run: {message}"):
        claim_directory(changed(path, value), str(tmp_path))
    assert config_hash(changed(path, value)) != config_hash(tiny.trainer_config("elsewhere"))


def test_other_processes_only_check(tmp_path):
    claim_directory(tiny.trainer_config("somewhere"), str(tmp_path), write=False)
    assert list(tmp_path.iterdir()) == []


def test_what_a_dispatcher_drops_may_not_change_but_how_it_sends_may():
    def lines(dispatcher):
        moe = MoELayer.default_config().set(dispatcher=dispatcher)
        return identity(tiny.trainer_config("somewhere").set(model=moe).debug_string())

    ragged = lines(RaggedDispatcher.default_config())
    assert ragged == lines(SortedDispatcher.default_config())
    assert ragged != lines(CapacityDispatcher.default_config())
    bounded = lines(RaggedDispatcher.default_config().set(buffer_factor=2.0))
    assert bounded.items() - ragged.items() == {("model.dispatcher.buffer_factor", "2.0")}
