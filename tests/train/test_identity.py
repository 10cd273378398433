"""Whose folder it is: what of a config may change on the way, and what may not."""

import pathlib

import pytest

from moelib.train.identity import TrainerDirConflictError, claim_directory, config_hash
from tests.train import tiny


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
