import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moelib.core.param import FanAxes, ParameterSpec
from moelib.learner import factored
from tests.learner.example import arrays

MATRIX = ParameterSpec((6, 8), (None, None), "float32", fan_axes=FanAxes((0,), (1,)))
SPECS = {"w": MATRIX.stacked(9)}  # More layers than rows or columns.
GRADS = arrays(SPECS)


def apply(transform, updates, params=None):
    return jax.jit(transform.update)(updates, transform.init(updates), params)


def test_stacked_matrices_are_factored_one_by_one():
    ours = factored.scale_by_factored_rms(SPECS, 0.8, min_dim_size_to_factor=4, eps=1e-30)
    theirs = optax.scale_by_factored_rms(min_dim_size_to_factor=4)
    updates, state = apply(ours, GRADS)
    assert state.row["w"].shape == (9, 6)
    assert state.col["w"].shape == (9, 8)
    assert state.full == {}
    one_by_one = lambda w: theirs.update({"w": w}, theirs.init({"w": w}), {"w": w})[0]["w"]
    expected = jax.lax.map(one_by_one, GRADS["w"])
    np.testing.assert_allclose(updates["w"], expected, rtol=1e-5)


def test_small_matrices_are_not_factored():
    _, state = apply(factored.scale_by_factored_rms(SPECS, 0.8, 128, 1e-30), GRADS)
    assert state.row == {}
    assert state.full["w"].shape == (9, 6, 8)


@pytest.mark.parametrize("specs", [SPECS, None])
def test_clipping_is_of_each_matrix(specs):
    updates = {"w": GRADS["w"] * jnp.arange(9.0)[:, None, None]}
    out, _ = apply(factored.clip_by_rms(specs, 2.0), updates)
    axes = (0, 1, 2) if specs is None else (1, 2)
    before = np.sqrt(np.mean(np.square(updates["w"]), axis=axes))
    after = np.sqrt(np.mean(np.square(out["w"]), axis=axes))
    np.testing.assert_allclose(after, np.minimum(before, 2.0), rtol=1e-6)


def test_updates_are_relative_to_each_matrix():
    params = {"w": jnp.ones((9, 6, 8)) * jnp.arange(9.0)[:, None, None]}
    out, _ = apply(factored.scale_by_param_rms(SPECS), params, params)
    sizes = np.maximum(np.arange(9.0), 1e-3)
    np.testing.assert_allclose(out["w"][:, 0, 0], sizes * np.arange(9.0), rtol=1e-6)
