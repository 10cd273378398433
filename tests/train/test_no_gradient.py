"""Parameters that the objective does not depend on are reported, and no others."""

import jax
import jax.numpy as jnp
import pytest

from moelib.core.config import config_for_function
from moelib.core.param import ParameterSpec
from moelib.layers.initializers import constant
from moelib.learner.optimizers import sgd_optimizer
from moelib.train.no_gradient import paths_without_gradient, tag_gradients
from tests import tiny


class CutOff(tiny.TinyModel):
    """A model with parameters whose values reach the loss without a derivative."""

    def _create_layer_parameter_specs(self):
        ones = lambda: ParameterSpec((16,), ("embed",), "float32", initializer=constant(1.0))
        names = ("stopped", "rounded", "unused", "linear")
        return super()._create_layer_parameter_specs() | {name: ones() for name in names}

    def forward(self, batch):
        loss, metrics = super().forward(batch)
        params = self.parameters
        self.add_aux_loss("linear", jnp.sum(params["linear"]), weight=0.5)
        x = jax.lax.stop_gradient(params["stopped"]) + (9 * params["rounded"]).astype(jnp.int32)
        return loss._replace(mean=loss.mean + jnp.sum(x)), metrics


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_first_step_warns_of_parameters_without_gradient(tmp_path, caplog, num_microbatches):
    cfg = tiny.trainer_config(tmp_path, evaler=False).set(num_microbatches=num_microbatches)
    cfg.input.global_batch_size = 16
    cfg.model = CutOff.default_config()
    cfg.learner.optimizer = config_for_function(sgd_optimizer).set(learning_rate=0.1)
    trainer = cfg.instantiate(parent=None)
    trainer.compile_train_step()
    (record,) = [r for r in caplog.records if r.name == "moelib.train.no_gradient"]
    assert record.levelname == "WARNING"
    assert record.args == (3, 6, "rounded, stopped, unused")
    assert "`fixed`" in record.msg


@pytest.mark.parametrize("in_refs", [False, True])
def test_parameters_of_stacked_and_rematerialized_layers(in_refs):
    def layer(params, x):
        return x @ params["used"] + jax.lax.stop_gradient(x @ params["stopped"])

    def loss(params, x):
        body = lambda carry, each: (jax.checkpoint(layer)(each, carry), None)
        return jnp.sum(jax.lax.scan(body, x, params)[0] ** 2)

    def gradients(params, x):
        if not in_refs:
            return jax.grad(loss)(params, x)
        refs = jax.tree.map(lambda x: jax.new_ref(jnp.ones_like(x)), params)
        value, pull = jax.vjp(lambda params: loss(params, x), params)
        pull.with_refs(refs)(jnp.ones_like(value))
        return jax.tree.map(jax.freeze, refs)

    params = {name: jnp.ones((3, 4, 4)) for name in ("used", "stopped")}
    step = lambda params, x: tag_gradients(gradients(params, x))
    traced = jax.jit(step).trace(params, jnp.ones((2, 4)))
    assert list(paths_without_gradient(traced.jaxpr)) == ["stopped"]


@pytest.mark.parametrize("remat", [False, True])
def test_parameters_below_stacked_layers_that_cut_the_gradient(remat):
    def layer(params, x):
        return jnp.round(x) @ params

    def loss(params, x):
        step = jax.checkpoint(layer) if remat else layer
        body = lambda carry, each: (step(each, carry), None)
        return jnp.sum(jax.lax.scan(body, x @ params["below"], params["stacked"])[0] ** 2)

    params = {"below": jnp.ones((4, 4)), "stacked": jnp.ones((3, 4, 4))}
    step = lambda params, x: tag_gradients(jax.grad(loss)(params, x))
    traced = jax.jit(step).trace(params, jnp.ones((2, 4)))
    assert list(paths_without_gradient(traced.jaxpr)) == ["below"]
