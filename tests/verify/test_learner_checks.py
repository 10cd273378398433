"""Learning rates that `verify` expects, against values worked out by hand, and its updates."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moelib.core import tree
from moelib.core.config import config_for_function
from moelib.layers.norm import BaseNorm
from moelib.learner import optimizers, schedules, transforms
from moelib.learner.learner import LearnerState, UpdateType
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


def squared(step, warmup_steps):
    return jnp.minimum(step / warmup_steps, 1.0) ** 2


def early(step, warmup_steps):
    return jnp.minimum((step + 1) / warmup_steps, 1.0)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("_DECAYS", schedules._DECAYS | {"exponential": lambda r: (1 - r) ** 2}),
        ("_warmup", squared),
        ("_warmup", early),
    ],
)
def test_another_shape_of_a_schedule_is_found(monkeypatch, name, other):
    cfg, fields = tiny().set(dir="unused"), {"warmup_steps": 1, "decay_steps": 2, "max_step": 4}
    wsd = config_for_function(schedules.wsd).set(decay="exponential", **fields)
    cfg.learner.optimizer.set(learning_rate=wsd)
    monkeypatch.setattr(schedules, name, other)
    assert "learner.optimizer.learning_rate at step" in str(learner(SimpleNamespace(config=cfg)))


def cosine():
    """A schedule of the user's own, which has the name of one of the library."""
    return lambda step: 1.0


@pytest.mark.parametrize("function", [cosine, schedules.for_optax])
def test_another_schedule_is_skipped(function):
    with pytest.raises(CheckSkippedError, match=function.__name__):
        rate_at(config_for_function(function), 1)


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


def optimizer_of(name: str) -> Any:
    """Returns the config of an optimizer, after clipping."""
    fields = OPTIMIZERS[name] | {"learning_rate": 0.01}
    optimizer = config_for_function(getattr(optimizers, f"{name}_optimizer")).set(**fields)
    clip = config_for_function(transforms.clip_by_global_norm).set(max_norm=1.0)
    return config_for_function(transforms.chain).set(args=[clip, optimizer])


def known(optimizer: Any, **fields: Any) -> Any:
    """Returns what the check needs of a reference, without the step around the updates."""
    cfg = tiny().set(dir="unused", mesh_shape=(1,) * 6)
    optimizer = optimizer_of(optimizer) if isinstance(optimizer, str) else optimizer
    skip = config_for_function(transforms.skip_bad_steps)
    cfg.learner.set(**{"optimizer": optimizer, "skip": skip} | fields)
    trainer = cfg.instantiate(parent=None, devices=jax.devices()[:1])
    params = jax.tree.map(np.asarray, initial(trainer.model))
    gradients = jax.tree.map(
        lambda x: np.random.default_rng(x.size).standard_normal(x.shape).astype(np.float32),
        tree.select(params, trainer.learner.is_updated),
    )
    update = update_of(trainer.learner)

    def probe(state, batch, gradients):
        out = update(gradients, state.learner, state.model, jnp.float32(1.0))
        return SimpleNamespace(
            updated=out.params, learner=out.state, metrics=out.metrics, gradients=gradients
        )

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


SGD = config_for_function(optimizers.sgd_optimizer).set(learning_rate=0.01)
DROP = config_for_function(transforms.skip_bad_steps).set(drop_norm=3.0)
NORMS = r".*norm/scale"


def test_updates_of_optax_equal_their_formulas():
    clip = config_for_function(optax.clip_by_global_norm).set(max_norm=1.0)
    adamw = config_for_function(optax.adamw).set(learning_rate=0.01, weight_decay=0.1)
    cfg = config_for_function(transforms.chain).set(args=[clip, adamw])
    rules = [(NORMS, config_for_function(optax.sgd).set(learning_rate=0.1, momentum=0.5))]
    assert learner(known(cfg, update_rules=rules)) is None


def test_rules_without_a_formula_are_named():
    adam = config_for_function(optax.adam).set(learning_rate=0.01)
    with pytest.raises(CheckSkippedError, match=r"optimizer adam of rule0"):
        learner(known(SGD, update_rules=[(NORMS, adam)], skip=DROP))


@pytest.mark.parametrize(
    ("fields", "others"),
    [
        ({"optimizer": optimizer_of("lion")}, {"optimizer": optimizer_of("sgd")}),
        ({"skip": DROP}, {"skip": DROP.clone(drop_norm=None)}),
        ({"update_rules": [(NORMS, UpdateType.NO_UPDATE)]}, {}),
        ({"update_rules": [(NORMS, SGD)]}, {"update_rules": [(NORMS, SGD.clone(momentum=0.5))]}),
    ],
)
def test_another_update_is_found(fields, others):
    built = known(**{"optimizer": SGD} | others)
    built.config = built.config.clone(learner=built.config.learner.clone(**fields))
    assert "after update" in str(learner(built))


def test_decay_of_norms_is_found(monkeypatch):
    create = BaseNorm._create_layer_parameter_specs

    def decayed(self):
        specs = create(self)
        return {p: dataclasses.replace(x, weight_decay_scale=1.0) for p, x in specs.items()}

    monkeypatch.setattr(BaseNorm, "_create_layer_parameter_specs", decayed)
    assert "norm/scale" in str(learner(known(SGD.clone(weight_decay=0.1))))


@pytest.mark.parametrize("name", ["gradient_norm", "learning_rate"])
def test_other_metrics_are_found(name):
    built = known(SGD)
    probe = built.probe

    def other(*args):
        out = probe(*args)
        out.metrics[name] *= 2
        return out

    other.trainer = probe.trainer
    built.probe = other
    assert str(learner(built)).startswith(name)
