"""Runs read from their own files."""

import json
import math

import numpy as np
import pytest

from moelib.analysis.training_runs import TRAINING, VALIDATION, default_metric, read_curve, select
from moelib.core.errors import UserError
from moelib.models.cost import model_cost
from moelib.runs.phases import Phase
from tests.analysis.runs import config, write_run


def test_a_run_has_the_counts_of_its_config_and_the_losses_of_its_metrics(tmp_path):
    cfg = config()
    curve = read_curve(write_run(tmp_path / "a", cfg, [4.0, 3.0]))
    cost = model_cost(cfg.model.clone(name="m").instantiate(parent=None), seq_len=128)
    per_step = 8 * 128 * cost.train_flops_per_token
    run = curve.run
    assert (run.loss, run.steps, run.max_step, run.vocab_size) == (3.0, 400, 400, 64)
    assert run.parameters - run.non_embedding_parameters == 2 * 64 * 32
    assert run.total_parameters == cost.total_parameters
    assert run.tokens == 400 * 1000
    assert run.flops == per_step * 400
    np.testing.assert_allclose(curve.steps, [200, 400])
    np.testing.assert_allclose(curve.flops, [200 * per_step, 400 * per_step])
    np.testing.assert_allclose(curve.seconds, [100, 200])
    assert "{data_dir}/text" in run.data


def test_a_loss_that_is_not_finite_is_kept_as_nan(tmp_path):
    curve = read_curve(write_run(tmp_path / "a", config(), [4.0, None]))
    assert math.isnan(curve.run.loss)
    assert curve.losses[0] == 4.0


def test_losses_of_evaluations_are_used_if_all_runs_have_them(tmp_path):
    folders = [write_run(tmp_path / name, config(), [4.0, 3.0]) for name in "ab"]
    assert default_metric(folders) == TRAINING
    for folder in folders:
        with open(f"{folder}/metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": 400, VALIDATION: 3.5}) + "\n")
        assert default_metric([folder]) == VALIDATION
    assert default_metric(folders) == VALIDATION
    curve = read_curve(folders[0], VALIDATION)
    assert (curve.run.loss, curve.seconds.tolist()) == (3.5, [200.0])


def test_counts_are_those_at_the_step_of_the_loss(tmp_path):
    """A run whose last steps were not evaluated is not finished with this loss."""
    folder = write_run(tmp_path / "a", config(), [4.0, 3.0])
    with open(f"{folder}/metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 300, VALIDATION: 3.5}) + "\n")
    trained, evaluated = (read_curve(folder, metric).run for metric in (TRAINING, VALIDATION))
    assert evaluated.steps == 300
    assert evaluated.tokens == pytest.approx(0.75 * trained.tokens)
    assert evaluated.flops == pytest.approx(0.75 * trained.flops)
    assert select([evaluated])[1] == {folder: "its last loss is of step 300 of 400"}


def test_runs_that_cannot_be_read_are_named(tmp_path):
    folder = write_run(tmp_path / "a", config(), [4.0, 3.0])
    with pytest.raises(UserError, match=r"a: no line of its metrics.jsonl has 'other'"):
        read_curve(folder, "other")
    with pytest.raises(UserError, match=r"none/config.txt cannot be read"):
        read_curve(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("path", "value", "is_refused"),
    [
        ("input.global_batch_size", 64, True),
        ("input.seq_len", 64, True),
        ("input.source.split", "other", False),
        ("learner.optimizer.learning_rate", 0.1, False),
    ],
)
def test_a_run_whose_steps_have_different_flops_is_refused(tmp_path, path, value, is_refused):
    later = Phase.default_config().set(after_step=100, changes={path: value})
    folder = write_run(tmp_path / "a", config().set(phases={"later": later}), [4.0, 3.0])
    if not is_refused:
        assert read_curve(folder).run.steps == 400
        return
    with pytest.raises(UserError, match=rf"phases\.later\.changes has '{path}'"):
        read_curve(folder)


def test_a_run_that_has_just_begun_has_no_loss(tmp_path):
    folder = write_run(tmp_path / "a", config(), [4.0, 3.0])
    (tmp_path / "a/metrics.jsonl").unlink()
    run = read_curve(folder).run
    assert run.steps == 0
    assert math.isnan(run.loss)
    assert select([run])[1] == {folder: "it is at step 0 of 400, without a loss"}
