"""Comparison of a kernel with its definition, and devices to trace it for."""

import contextlib
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType


def assert_close(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    """Asserts that no value of an array is off by more than a share of the largest."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max(initial=0))


def pulled(function: Any, grad: Any, *primals: Any) -> tuple[Any, Any]:
    """Returns (value, gradients of `sum(value * grad)` in the primals)."""
    value, pull = jax.vjp(function, *primals)
    return value, pull(grad.astype(value.dtype))


def compiled_for(
    kind: str, num_devices: int = 1, axis_type: AxisType = AxisType.Auto
) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which programs are traced for a mesh, of one axis, of absent devices."""
    platform = "tpu" if kind.startswith("TPU") else "gpu"
    device = AbstractDevice(device_kind=kind, num_cores=1, platform=platform)
    mesh = AbstractMesh((num_devices,), ("x",), axis_types=(axis_type,), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)
