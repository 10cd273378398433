"""Training as one call."""

import pytest

from moelib.core.config import REQUIRED
from moelib.core.errors import UserError
from moelib.tasks.fit import fit
from moelib.tasks.task import Task
from tests import tiny


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


@pytest.mark.parametrize(
    ("trainer", "arguments", "message"),
    [
        (tiny.trainer_config(""), {}, "trainer_dir"),
        (tiny.trainer_config("").set(dir=REQUIRED), {}, "trainer_dir"),
        (tiny.trainer_config("unused"), {"prng_key": 0.5}, "prng_key=0.5"),
        (Task, {"examples": [], "batch_size": 8}, r"trainer is <class .*Task'>"),
        (None, {}, "trainer is None"),
    ],
)
def test_invalid_arguments_are_refused(trainer, arguments, message):
    with pytest.raises(UserError, match=message):
        fit(trainer, **arguments)


def test_settings_of_a_trainer_that_is_built_are_refused(tmp_path):
    trainer = tiny.trainer_config(tmp_path).instantiate(parent=None)
    with pytest.raises(UserError, match="max_step=3"):
        fit(trainer, max_step=3)
