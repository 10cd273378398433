"""Learning rates that `verify` expects, against values worked out by hand, and its updates."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core import tree
from moelib.core.config import config_for_function
from moelib.learner import optimizers, schedules, transforms
from moelib.learner.learner import LearnerState
from moelib.verify.learner_checks import learner, rate_at
from moelib.verify.outcome import CheckSkippedError
from tests.learner.example import update_of
from tests.tiny import initial
from tests.verify.tiny import tiny


@pytest.mark.parametrize(
    ("schedule", "fields", "step", "rate"),
    [
        ("constant", {"peak_lr": 2.0, "warmup_steps": 4}, 1, 0.5),
        ("linear", {"peak_lr": 1.0, "max_step": 10, "warmup_steps": 2, "end_lr": 0.2}, 6, 0.6),
        ("cosine", {"peak_lr": 1.0, "max_step": 8}, 4, 0.5),
        ("inverse_sqrt", {"peak_lr": 1.0, "warmup_steps": 4}, 16, 0.5),
        ("wsd", {"peak_lr": 1.0, "max_step": 10, "decay_steps": 4}, 6, 1.0),
        ("wsd", {"peak_lr": 1.0, "max_step": 10, "decay_steps": 4}, 9, 0.25),
    ],
)
def test_rates_of_schedules(schedule, fields, step, rate):
    cfg = config_for_function(getattr(schedules, schedule)).set(**fields)
    assert rate_at(cfg, step) == pytest.approx(rate)
    assert float(cfg.instantiate()(step)) == pytest.approx(rate)


def test_another_schedule_is_skipped():
    with pytest.raises(CheckSkippedError, match="my_schedule"):
        rate_at(config_for_function(my_schedule), 1)


def my_schedule():
    return lambda step: 1.0


OPTIMIZERS: dict[str, dict[str, Any]] = {  # Runs of `verify` in other tests have AdamW.
    "adamw_decoupled": {"weight_decay": 0.3, "update_schedule": 0.5},
    "sgd": {"momentum": 0.7, "nesterov": True, "weight_decay": 0.1},
    "lion": {"weight_decay": 0.2},
}


class _State(SimpleNamespace):
    """A trainer's state, as far as updates need it."""

    model: dict
    learner: LearnerState

    def _replace(self, **changes):
        return _State(**(vars(self) | changes))


def known(name: str) -> SimpleNamespace:
    """Returns what the check needs of a reference, without the step around the updates."""
    cfg = tiny().set(dir="unused", mesh_shape=(1,) * 6)
    fields = OPTIMIZERS[name] | {"learning_rate": 0.01}
    optimizer = config_for_function(getattr(optimizers, f"{name}_optimizer")).set(**fields)
    clip = config_for_function(transforms.clip_by_global_norm).set(max_norm=1.0)
    cfg.learner.optimizer = config_for_function(transforms.chain).set(args=[clip, optimizer])
    cfg.learner.skip = config_for_function(transforms.skip_bad_steps)
    trainer = cfg.instantiate(parent=None, devices=jax.devices()[:1])
    params = jax.tree.map(np.asarray, initial(trainer.model))
    gradients = jax.tree.map(
        lambda x: np.random.default_rng(x.size).standard_normal(x.shape).astype(np.float32),
        tree.select(params, trainer.learner.is_updated),
    )
    update = update_of(trainer.learner)

    def probe(state, batch, gradients):
        out = update(gradients, state.learner, state.model, jnp.float32(1.0))
        return SimpleNamespace(updated=out.params, learner=out.state)

    probe.trainer = trainer
    return SimpleNamespace(
        config=trainer.config,
        probe=probe,
        start=_State(model=params, learner=trainer.learner.init(params)),
        first=SimpleNamespace(gradients=gradients),
        batches=[None],
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_equal_their_formulas(name):
    assert learner(known(name)) is None


def test_another_update_is_found(monkeypatch):
    built = known("lion")
    monkeypatch.setitem(OPTIMIZERS, "lion", {"weight_decay": 0.21})
    other = known("lion")
    other.config = built.config
    assert "after update 1" in str(learner(other))
