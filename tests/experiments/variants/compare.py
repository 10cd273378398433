"""A layer against a reference in NumPy and float64: values, and gradients by finite differences."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moelib.core import tree
from tests.layers.calling import float64


def assert_equal_to_reference(
    run: Callable[[Any], Any], reference: Callable[[Any], Any], operands: Any
) -> None:
    """Asserts equal values, and equal derivatives along a random direction of each operand.

    Args:
        run: Function of the operands in float32, which JAX differentiates.
        reference: The same function of operands in float64.
        operands: Tree of arrays, all of which are differentiated.
    """
    rng, start = np.random.default_rng(7), float64(operands)
    want = reference(start)
    weights = rng.standard_normal(want.shape)

    def value_and_gradients(operands: Any) -> Any:
        value, pull = jax.vjp(run, operands)
        return value, pull(jnp.asarray(weights, value.dtype))[0]

    operands = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), operands)
    value, gradients = jax.jit(value_and_gradients)(operands)
    np.testing.assert_allclose(value, want, rtol=1e-4, atol=1e-5)
    flat, found = tree.by_path(start), tree.by_path(gradients)
    for path, x in flat.items():
        direction = rng.standard_normal(x.shape)
        moved = (tree.unflatten(flat | {path: x + h * direction}) for h in (1e-6, -1e-6))
        expected = np.vdot(weights, np.subtract(*map(reference, moved))) / 2e-6
        got = np.vdot(np.float64(found[path]), direction)
        scale = np.linalg.norm(np.float64(found[path])) + 1e-3
        assert abs(got - expected) < 1e-4 * scale, (path, got, expected)
