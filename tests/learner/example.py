"""A small model's parameters, and learners for it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from moelib.core.config import config_for_function
from moelib.core.param import FanAxes, ParameterSpec, is_spec
from moelib.learner.learner import Learner, LearnerState, LearnerUpdate

LAYER = {
    "experts": ParameterSpec(
        (4, 6, 8), ("experts", "embed", "ffn"), "float32", fan_axes=FanAxes((1,), (2,), (0,))
    ),
    "qkv": ParameterSpec(
        (6, 3, 2, 4),
        ("embed", None, "heads", None),
        "float32",
        fan_axes=FanAxes((0,), (2, 3), (1,)),
    ),
    "scale": ParameterSpec((6,), ("norm",), "float32", weight_decay_scale=0.0),
    "bias": ParameterSpec((4,), ("experts",), "float32", trainable=False),
}
EMBEDDING = ParameterSpec((16, 6), ("vocab", "embed"), "float32", fan_axes=FanAxes((1,), (0,)))
NUM_LAYERS = 2
SPECS = {"emb": {"weight": EMBEDDING}, "layer": LAYER}
LOOP_SPECS = {"emb": {"weight": EMBEDDING}, **{f"layer{i}": LAYER for i in range(NUM_LAYERS)}}
SCAN_SPECS = {
    "emb": {"weight": EMBEDDING},
    "layers": {name: spec.stacked(NUM_LAYERS) for name, spec in LAYER.items()},
}


def arrays(specs: Any, seed: int = 0, dtype: str = "float32") -> Any:
    """Returns an array for each spec."""
    rng = np.random.default_rng(seed)
    draw = lambda spec: jnp.asarray(rng.normal(size=spec.shape), dtype)
    return jax.tree.map(draw, specs, is_leaf=is_spec)


def stacked(loop: Any) -> Any:
    """Returns the arrays of LOOP_SPECS in the structure of SCAN_SPECS."""
    layers = [loop[f"layer{i}"] for i in range(NUM_LAYERS)]
    return {"emb": loop["emb"], "layers": jax.tree.map(lambda *xs: jnp.stack(xs), *layers)}


def make_learner(optimizer: Any, specs: Any = None, **fields: Any) -> Learner:
    """Returns a learner; a function as optimizer takes its default arguments."""
    cfg = Learner.default_config().set(optimizer=optimizer, **fields)
    return cfg.instantiate(parent=None, param_specs=SPECS if specs is None else specs)


def ema_config(decay: float) -> Any:
    cfg = Learner.default_config().ema
    return cfg.set(decay=decay)


def fn(function: Any, **values: Any) -> Any:
    """Returns the config of a function with values set."""
    return config_for_function(function).set(**values)


@functools.lru_cache
def update_of(learner: Learner) -> Any:
    """Returns (gradients, state, params, loss=None) -> LearnerUpdate, compiled once a learner."""
    return jax.jit(
        lambda g, s, p, loss=None: learner.update(gradients=g, state=s, params=p, loss=loss)
    )


def run(
    learner: Learner, params: Any, num_steps: int, state: LearnerState | None = None
) -> LearnerUpdate:
    """Returns the last of some updates with gradients that depend on the step only."""
    state = learner.init(params) if state is None else state
    for step in range(num_steps):
        out = update_of(learner)(gradients_like(params, step), state, params)
        params, state = out.params, out.state
    return out


def run_optimizer(optimizer: optax.GradientTransformation, params: Any, num_steps: int = 3) -> Any:
    """Returns the parameters after some updates by an optimizer alone, with the same gradients."""

    @jax.jit
    def update(params: Any, state: Any, step: int) -> Any:
        updates, state = optimizer.update(_gradients_like(params, step), state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for step in range(num_steps):
        params, state = update(params, state, step)
    return params


def _gradients_like(params: Any, step: int) -> Any:
    """Returns gradients that are a function of the parameters' values and the step."""
    return jax.tree.map(lambda p: jnp.sin(3.0 * p + step) + 0.1 * p, params)


gradients_like = jax.jit(_gradients_like)


def assert_close(a: Any, b: Any, rtol: float = 1e-6, atol: float = 1e-6) -> None:
    """Asserts that the arrays of two trees are close."""
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


def assert_same_bits(a: Any, b: Any) -> None:
    """Asserts that two trees have the same structure and the same bits."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert jnp.asarray(x).tobytes() == jnp.asarray(y).tobytes()
