"""Comparison of a kernel's values and gradients with those of its definition."""

from typing import Any

import jax
import numpy as np


def assert_close(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    """Asserts that no value of an array is off by more than a share of the largest, or of 1."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        scale = max(1.0, np.abs(b).max(initial=0))
        np.testing.assert_allclose(a / scale, b / scale, atol=tolerance, rtol=0)


def pulled(function: Any, grad: Any, *primals: Any) -> tuple[Any, Any]:
    """Returns (value, gradients of `sum(value * grad)` in the primals)."""
    value, pull = jax.vjp(function, *primals)
    return value, pull(grad.astype(value.dtype))
