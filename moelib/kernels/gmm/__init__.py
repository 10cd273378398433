"""Grouped matmul: rows sorted by group, and a matrix for each group.

`gmm` and `gmm_weight_gradient` are the two entries. Each is the other's derivative, so both can be
differentiated any number of times, in reverse:

    out = gmm(lhs, rhs, group_sizes)
    d lhs = gmm(d out, rhs, group_sizes, transpose_rhs=True)
    d rhs = gmm_weight_gradient(lhs, d out, group_sizes)

A schedule that defers weight gradients calls the last two itself.

Shapes: m rows, k in, n out, g groups.
"""

import functools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moelib.kernels.backend import check_backend, run_on_backend
from moelib.kernels.gmm import cpu, reference, xla
from moelib.kernels.varying import align

__all__ = ["gmm", "gmm_weight_gradient"]

_BACKENDS: dict[str, ModuleType] = {"reference": reference, "cpu": cpu, "xla": xla}
_PLATFORMS = {"tpu": "xla", "default": "cpu"}


def gmm(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "g k n"] | Float[Array, "g n k"],
    group_sizes: Int[Array, "g"],
    *,
    transpose_rhs: bool = False,
    backend: str | None = None,
    preferred_element_type: DTypeLike | None = None,
) -> Float[Array, "m n"]:
    """Returns `lhs[i] @ rhs[group of row i]`, [m, n]; rows of no group are zeros.

    The first `group_sizes[0]` rows are the first group's, and so on. Rows past the sum of the group
    sizes belong to no group: they give zeros, have zero gradients, and may hold anything. Products
    are summed in float32; operands of two dtypes are multiplied in the wider. Differentiable in lhs
    and rhs, in reverse mode. With several devices it belongs inside of `jax.shard_map`: it is not
    partitioned by itself.

    Args:
        lhs: The rows, sorted by group.
        rhs: A matrix for each group, [g, k, n]; [g, n, k] if `transpose_rhs`.
        group_sizes: Number of rows of each group, 0 or more. Rows counted past m do not exist.
        transpose_rhs: Whether to multiply by each matrix's transpose; nothing is copied for it.
        backend: "cpu" (loops over blocks of rows, the default except on TPU), "xla"
            (`lax.ragged_dot`, the default on TPU), or "reference".
        preferred_element_type: Dtype of the result; lhs's by default.

    Raises:
        ValueError: If the shapes disagree, group_sizes are not integers, or the backend is unknown.
    """
    _check_group_sizes("gmm", group_sizes)
    if rhs.ndim != 3 or rhs.shape[2 if transpose_rhs else 1] != lhs.shape[1]:
        want = "[g, n, k]" if transpose_rhs else "[g, k, n]"
        raise ValueError(f"gmm: lhs {lhs.shape} is not [m, k] to {want} of rhs {rhs.shape}.")
    if rhs.shape[0] != group_sizes.shape[0]:
        raise ValueError(
            f"gmm: rhs {rhs.shape} has no matrix for each of {group_sizes.shape[0]} groups."
        )
    check_backend("gmm", backend, _BACKENDS)
    out_dtype = _out_dtype(lhs, preferred_element_type)
    return _gmm(transpose_rhs, backend, out_dtype, *align(lhs, rhs, group_sizes))


def gmm_weight_gradient(
    lhs: Float[Array, "m k"],
    grad: Float[Array, "m n"],
    group_sizes: Int[Array, "g"],
    *,
    backend: str | None = None,
    preferred_element_type: DTypeLike | None = None,
) -> Float[Array, "g k n"]:
    """Returns the sum of `lhs[i]^T grad[i]` over the rows i of each group, zeros for empty groups.

    The gradient of `gmm` in rhs, where grad is that of its result. Sums are in float32.
    Differentiable in lhs and grad, in reverse mode.

    Args:
        lhs: The rows, sorted by group, as for `gmm`.
        grad: As many rows.
        group_sizes: As for `gmm`.
        backend: As for `gmm`.
        preferred_element_type: Dtype of the result; lhs's by default.

    Raises:
        ValueError: If the shapes disagree, group_sizes are not integers, or the backend is unknown.
    """
    _check_group_sizes("gmm_weight_gradient", group_sizes)
    if lhs.shape[0] != grad.shape[0]:
        raise ValueError(f"gmm_weight_gradient: lhs {lhs.shape}, grad {grad.shape}: rows differ.")
    check_backend("gmm_weight_gradient", backend, _BACKENDS)
    out_dtype = _out_dtype(lhs, preferred_element_type)
    return _weight_gradient(backend, out_dtype, *align(lhs, grad, group_sizes))


def _check_group_sizes(kernel: str, group_sizes: Array) -> None:
    if group_sizes.ndim != 1 or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        shape, dtype = group_sizes.shape, group_sizes.dtype
        raise ValueError(f"{kernel}: group_sizes must be [g] integers, not {dtype}{list(shape)}.")


def _out_dtype(lhs: Array, preferred: DTypeLike | None) -> Any:
    return lhs.dtype if preferred is None else jnp.dtype(preferred)


def _run(name: str, backend: str | None, lhs: Array, other: Array, sizes: Array, **kw: Any) -> Any:
    """Runs the function called `name` of the backend's module, on operands of one dtype."""
    dtype = jnp.promote_types(lhs.dtype, other.dtype)
    runs = {
        key: functools.partial(getattr(module, name), **kw) for key, module in _BACKENDS.items()
    }
    operands = lhs.astype(dtype), other.astype(dtype), sizes
    return run_on_backend(name, backend, runs, _PLATFORMS, *operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gmm(
    transpose_rhs: bool, backend: str | None, out_dtype: Any, lhs: Array, rhs: Array, sizes: Array
) -> Array:
    options = {"transpose_rhs": transpose_rhs, "out_dtype": out_dtype}
    return _run("gmm", backend, lhs, rhs, sizes, **options)


def _gmm_forward(
    transpose_rhs: bool, backend: str | None, out_dtype: Any, *operands: Array
) -> tuple[Array, tuple[Array, ...]]:
    return _gmm(transpose_rhs, backend, out_dtype, *operands), operands


def _gmm_backward(
    transpose_rhs: bool,
    backend: str | None,
    out_dtype: Any,
    operands: tuple[Array, ...],
    grad: Array,
) -> tuple[Array, Array, None]:
    del out_dtype
    lhs, rhs, sizes = operands
    lhs_grad = _gmm(not transpose_rhs, backend, lhs.dtype, grad, rhs, sizes)
    pair = (grad, lhs) if transpose_rhs else (lhs, grad)
    return lhs_grad, _weight_gradient(backend, rhs.dtype, *pair, sizes), None


_gmm.defvjp(_gmm_forward, _gmm_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _weight_gradient(
    backend: str | None, out_dtype: Any, lhs: Array, grad: Array, sizes: Array
) -> Array:
    return _run("gmm_weight_gradient", backend, lhs, grad, sizes, out_dtype=out_dtype)


def _weight_gradient_forward(
    backend: str | None, out_dtype: Any, *operands: Array
) -> tuple[Array, tuple[Array, ...]]:
    return _weight_gradient(backend, out_dtype, *operands), operands


def _weight_gradient_backward(
    backend: str | None, out_dtype: Any, operands: tuple[Array, ...], cotangent: Array
) -> tuple[Array, Array, None]:
    del out_dtype
    lhs, grad, sizes = operands
    lhs_grad = _gmm(True, backend, lhs.dtype, grad, cotangent, sizes)
    grad_grad = _gmm(False, backend, grad.dtype, lhs, cotangent, sizes)
    return lhs_grad, grad_grad, None


_weight_gradient.defvjp(_weight_gradient_forward, _weight_gradient_backward)
