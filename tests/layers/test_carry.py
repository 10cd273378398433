"""Values carried from layer to layer: loop, scan, remat and nested stacks give the same ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core.config import config_class, config_for_function
from moelib.core.errors import UserError
from moelib.core.module import functional
from moelib.core.param import ParameterSpec
from moelib.layers.base import BaseLayer, bias_spec
from moelib.layers.carry import carried, carry, carry_names
from moelib.layers.initializers import normal
from moelib.layers.remat import remat
from moelib.layers.transformer import LoopStack, ScanStack
from moelib.train.pipeline import stack_of
from tests import tiny
from tests.layers.calling import build, call

B, S, D, L = 2, 3, 4, 4
X = jnp.asarray(np.random.default_rng(0).standard_normal((B, S, D)), jnp.float32)


class Recurrent(BaseLayer):
    """z = w x + 0.5 z of the layer before; y = x + z times the number of layers before."""

    @config_class
    class Config(BaseLayer.Config):
        input_dim: int = D
        batch: int | None = None  # Size of the first dimension of z; None for the right one.

    def _create_layer_parameter_specs(self):
        init = config_for_function(normal).set(std=1.0).instantiate()
        return {"w": bias_spec((D,), ("norm",), initializer=init)}

    def _create_layer_carry_specs(self, batch_size, seq_len):
        shape = (self.config.batch or batch_size, seq_len, D)
        return {
            "z": ParameterSpec(shape, ("batch", "sequence", None), "float32"),
            "count": ParameterSpec((), (), "int32"),
        }

    def forward(self, x, **side_inputs):
        del side_inputs
        z = self.parameters["w"][None, None] * x + 0.5 * carried(self, "z")
        count = carried(self, "count")
        carry(self, z=z, count=count + 1)
        return x + z * count.astype(x.dtype)


class WrongShape(Recurrent):
    """A layer that carries less than it declares."""

    def forward(self, x, **side_inputs):
        carry(self, z=x[:1])
        return x


def stack(kind, wrap=None, layer=Recurrent, num_first=1):
    first = [layer.default_config()] * num_first
    cfg = kind.default_config().set(
        input_dim=D, num_layers=L, first_layers=first, block=[layer.default_config()], remat=wrap
    )
    return build(cfg)


def run(made, params):
    def objective(params, x):
        y, _ = functional(made, None, params, (x,), is_training=True)
        return jnp.sum(jnp.sin(y)), y

    grad = jax.value_and_grad(objective, (0, 1), has_aux=True)
    (_, y), grads = jax.jit(grad)(params, X)
    return y, grads


@functools.cache
def of_loop():
    made = stack(LoopStack)
    params = tiny.initial(made)
    return params, *run(made, params)


def test_a_layer_reads_what_the_layer_before_carried():
    params, y, _ = of_loop()
    want, z = np.float64(X), 0.0
    for i in range(L):
        z = np.float64(params[f"layer{i}"]["w"]) * want + 0.5 * z
        want = want + z * i
    np.testing.assert_allclose(y, want, rtol=1e-5)


@pytest.mark.parametrize("with_remat", [False, True])
def test_a_scan_equals_a_loop_in_values_and_gradients(with_remat):
    params, y, (grads, grad_x) = of_loop()
    as_scan = lambda tree: {
        "layer0": tree["layer0"],
        "repeated0": jax.tree.map(lambda *x: jnp.stack(x), *(tree[f"layer{i}"] for i in (1, 2, 3))),
    }
    wrap = config_for_function(remat) if with_remat else None
    got = run(stack(ScanStack, wrap), as_scan(params))
    tiny.assert_trees_close(got, (y, (as_scan(grads), grad_x)))


def test_a_stack_inside_a_stack_goes_on_with_the_values():
    params, y, _ = of_loop()
    inner = stack(LoopStack, num_first=0).config.clone(num_layers=2)
    outer = LoopStack.default_config().set(input_dim=D, num_layers=2, block=[inner])
    pair = lambda i: {"layer0": params[f"layer{i}"], "layer1": params[f"layer{i + 1}"]}
    got, _ = run(build(outer), {"layer0": pair(0), "layer1": pair(2)})
    np.testing.assert_allclose(got, y, rtol=1e-6)


def test_a_layer_outside_of_a_stack_is_named():
    made = build(Recurrent.default_config())
    assert carry_names(made) == ("z", "count")
    with pytest.raises(UserError, match=r"layer \(Recurrent\) carries z, count"):
        call(made, tiny.initial(made), X)


def test_other_shapes_are_refused():
    made = stack(LoopStack, layer=WrongShape)
    with pytest.raises(ValueError, match=r"z is float32 \(1, 3, 4\)"):
        call(made, tiny.initial(made), X)
    cfg = LoopStack.default_config().set(input_dim=D, num_layers=2)
    cfg.block = [Recurrent.default_config(), Recurrent.default_config().set(batch=7)]
    made = build(cfg)
    with pytest.raises(UserError, match=r"block\[1\] carries 'z' of float32 \(7, 3, 4\)"):
        call(made, tiny.initial(made), X)


def test_a_pipeline_refuses_layers_that_carry():
    cfg = tiny.model_config(tiny.stacked(Recurrent.default_config(), num_layers=2))
    with pytest.raises(UserError, match=r"\(Recurrent\) carries z, count .* set pipeline=1"):
        stack_of(cfg.instantiate(parent=None))
