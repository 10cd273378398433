"""The gradient-noise scale of a quadratic whose noise is known.

Expectations are exact: the mean over all batches that two equally likely values can form.
"""

import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moelib.core.config import config_class
from moelib.core.errors import UserError
from moelib.core.metrics import weighted
from moelib.core.param import ParameterSpec
from moelib.layers.initializers import constant
from moelib.learner.learner import Learner
from moelib.models.model import Model
from moelib.parallel.pipeline.schedule import Schedule
from moelib.train import state as state_lib
from moelib.train.metrics import unpack
from moelib.train.step import make_train_step
from moelib.train.watchers.gradient_noise import SCALE, SQUARED_NORM, TRACE, NoiseScale, estimates
from tests import tiny

# Four sequences of two tokens, some of which are padding: micro-batches have 0 to 4 tokens.
MASK = np.array([[1, 1], [1, 0], [1, 1], [0, 0]], bool)
A, B = 0.7, -0.2


class Quadratic(Model):
    """The loss ((a - x)^2 + (b - 2 x)^2) / 2 of tokens x: its gradient is (a - x, b - 2 x)."""

    def _create_layer_parameter_specs(self):
        return {
            "a": ParameterSpec((), (), "float32", initializer=constant(A)),
            "b": ParameterSpec((), (), "float32", initializer=constant(B)),
        }

    def forward(self, batch):
        x, mask = batch["x"], batch["mask"].astype(jnp.float32)
        a, b = self.parameters["a"], self.parameters["b"]
        losses = jnp.square(a - x) + jnp.square(b - 2 * x)
        num = jnp.sum(mask)
        return weighted(0.5 * jnp.sum(mask * losses) / jnp.maximum(num, 1.0), num), {}


class CountedQuadratic(Quadratic):
    """The same with the numbers of tokens, by which a step then weights micro-batches."""

    @config_class
    class Config(Quadratic.Config):
        pass

    def token_counts(self, batch):
        num = jnp.sum(batch["mask"], dtype=jnp.float32)
        return num, num


def run_all(model, num_microbatches, **axes):
    """Returns [(|G|^2, trace)] of every batch whose tokens are -1 or 1."""
    model = model.default_config().set(name="model").instantiate(parent=None)
    specs = model.create_parameter_specs_recursively()
    cfg = Learner.default_config().set(name="learner", optimizer=optax.sgd(0.0))
    learner = cfg.instantiate(parent=None, param_specs=specs)
    step = make_train_step(
        model, learner, num_microbatches=num_microbatches, log_gradient_noise=True
    )
    mesh = tiny.mesh(**axes)
    found = []
    with jax.set_mesh(mesh):
        shardings = state_lib.state_shardings(state_lib.state_specs(model, learner), learner, mesh)
        state = state_lib.init_state(model, learner, 0, shardings)
        rows = jax.NamedSharding(mesh, jax.P(("data", "expert", "fsdp")))
        run = jax.jit(step)
        for signs in itertools.product((-1.0, 1.0), repeat=int(MASK.sum())):
            x = np.zeros(MASK.shape, np.float32)
            x[MASK] = signs
            _, packed = run(state, jax.device_put({"x": x, "mask": MASK}, rows))
            metrics = unpack(packed)
            found.append((metrics[SQUARED_NORM], metrics[TRACE]))
    return np.array(found)


@pytest.mark.parametrize(
    ("model", "num_microbatches", "axes"),
    [(CountedQuadratic, 2, {}), (Quadratic, 4, {}), (CountedQuadratic, 2, {"data": 2})],
)
def test_estimates_are_unbiased_for_any_micro_batches_and_mesh(model, num_microbatches, axes):
    found = run_all(model, num_microbatches, **axes)
    # x has mean 0 and variance 1: the noise of (a - x, b - 2 x) is 1 + 4.
    np.testing.assert_allclose(found.mean(0), [A**2 + B**2, 5.0], rtol=1e-5)
    assert found.std(0).min() > 0.1


def test_a_batch_with_tokens_in_one_micro_batch_has_no_estimate():
    small = {
        "gradient_noise/small": weighted(2.0, 6.0),
        "gradient_noise/per_token": weighted(1 / 6, 6),
    }
    found = estimates(small, jnp.sqrt(2.0))
    assert not any(map(math.isfinite, map(float, found.values())))
    assert not small


def test_the_scale_is_the_ratio_of_running_averages():
    noise, rng = NoiseScale.default_config().instantiate(), np.random.default_rng(0)
    values = rng.normal([2.0, 30.0], [1.0, 10.0], (300, 2))
    for squared_norm, trace in values:
        scale = noise.step_done(1, {SQUARED_NORM: squared_norm, TRACE: trace})[SCALE]
        noise.step_done(1, {SQUARED_NORM: math.nan, TRACE: trace})  # Not counted.
    weights = 0.99 ** np.arange(300)[::-1]
    assert scale == pytest.approx(weights @ values[:, 1] / (weights @ values[:, 0]))
    assert scale == pytest.approx(15.0, rel=0.2)
    new = NoiseScale.default_config().instantiate()
    assert math.isnan(new.step_done(1, {SQUARED_NORM: -1.0, TRACE: 1.0})[SCALE])


def test_a_run_logs_the_estimates_and_the_scale(tmp_path):
    cfg = tiny.trainer_config(tmp_path, max_step=3, evaler=False)
    cfg.set(num_microbatches=2, log_gradient_noise=True, mesh_shape=(1, 4, 1, 1, 1, 2))
    cfg.set(checkpointer=None)
    cfg.instantiate(parent=None).run()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    first = lines[0]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert first[SCALE] == pytest.approx(first[TRACE] / first[SQUARED_NORM])
    assert {SCALE, TRACE, SQUARED_NORM} <= lines[-1].keys()
    assert len([name for name in first if "gradient_noise" in name]) == 3


def test_a_step_without_two_batch_sizes_is_refused(tmp_path):
    cfg = tiny.trainer_config(tmp_path).set(log_gradient_noise=True)
    with pytest.raises(UserError, match=r"log_gradient_noise=True.*num_microbatches=1"):
        cfg.instantiate(parent=None)
    cfg = tiny.trainer_config(tmp_path, model=tiny.model_config())
    cfg.set(log_gradient_noise=True, num_microbatches=4, pipeline_schedule=Schedule.GPIPE)
    cfg.set(mesh_shape=(2, 4, 1, 1, 1, 1))
    with pytest.raises(UserError, match=r"log_gradient_noise=True.*pipeline"):
        _ = cfg.instantiate(parent=None).pipeline
