"""Training as one call."""

import pytest

from moelib.core.config import REQUIRED
from moelib.core.errors import UserError
from moelib.train.fit import fit
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


@pytest.mark.parametrize("folder", ["", REQUIRED])
def test_run_without_a_folder_is_refused(folder):
    with pytest.raises(UserError, match="trainer_dir"):
        fit(tiny.trainer_config("").set(dir=folder))


def test_settings_of_a_trainer_that_is_built_are_refused(tmp_path):
    trainer = tiny.trainer_config(tmp_path).instantiate(parent=None)
    with pytest.raises(UserError, match="max_step=3"):
        fit(trainer, max_step=3)


def test_what_is_no_trainer_is_refused():
    with pytest.raises(UserError, match="trainer is None"):
        fit(None)  # pyrefly: ignore
