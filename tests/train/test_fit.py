"""Training as one call."""

import errno
import os

import pytest

from moelib.checkpoint.contents import list_checkpoints
from moelib.core.config import REQUIRED
from moelib.core.errors import UserError
from moelib.train.fit import fit
from moelib.train.task import Task
from tests import tiny
from tests.train import small_run


def test_trains_and_resumes_without_changing_the_config(tmp_path):
    cfg = tiny.trainer_config("", max_step=1, save_every=1)
    first = fit(cfg, trainer_dir=str(tmp_path))
    assert (first.step, first.stopped_by, first.trainer_dir) == (1, None, str(tmp_path))
    assert cfg.dir == ""
    second = fit(cfg, trainer_dir=tmp_path, max_step=2)
    losses = tiny.losses(tmp_path)
    assert {1: first.metrics["loss"], 2: second.metrics["loss"]} == losses
    assert second.evaluations["val"]["perplexity"] > 1
    finished = fit(cfg, trainer_dir=tmp_path)  # No step is left.
    assert (finished.metrics, finished.evaluations) == ({}, second.evaluations)


@pytest.mark.parametrize("folder", ["", REQUIRED])
def test_run_without_a_folder_is_refused(folder):
    with pytest.raises(UserError, match="trainer_dir"):
        fit(tiny.trainer_config("").set(dir=folder))


@pytest.mark.parametrize("prng_key", ["a", 0.5])
def test_what_is_no_key_is_refused(prng_key, tmp_path):
    with pytest.raises(UserError, match=f"prng_key={prng_key!r}"):
        fit(tiny.trainer_config(tmp_path), prng_key=prng_key)


def test_settings_of_a_trainer_that_is_built_are_refused(tmp_path):
    trainer = tiny.trainer_config(tmp_path).instantiate(parent=None)
    with pytest.raises(UserError, match="max_step=3"):
        fit(trainer, max_step=3)


def test_what_is_no_trainer_is_refused():
    with pytest.raises(UserError, match=r"trainer is <class .*Task'>"):
        fit(Task, [], batch_size=8)
    with pytest.raises(UserError, match="trainer is None"):
        fit(None)  # pyrefly: ignore


@pytest.mark.slow
def test_a_disk_that_fails_ends_the_run_after_sound_checkpoints(tmp_path, monkeypatch):
    source = small_run.make_store(tmp_path / "store")
    read, num_reads = os.pread, 0

    def fail_later(*arguments):
        nonlocal num_reads
        num_reads += 1
        if num_reads > 400:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(*arguments)

    monkeypatch.setattr(os, "pread", fail_later)
    with pytest.raises(UserError, match=f"{tmp_path}/store/.* cannot be read: Input/output"):
        fit(small_run.trainer_config(tmp_path / "run", source, max_step=9))
    steps = list(tiny.losses(tmp_path / "run"))
    assert steps in ([1], [1, 2], [1, 2, 3])
    assert list(list_checkpoints(str(tmp_path / "run/checkpoints"))) == steps
