"""The entry `gmm_activated`: gate and up of every expert in one grouped matmul, and activated.

On TPUs the kernel applies the activation to the float32 products before they leave VMEM, so [m, n]
is written instead of p times as much; the products too only if they will be differentiated.
Elsewhere it is a grouped matmul and then the activation.

Shapes: m rows, k in, n out, g groups held, s groups counted, p matrices side by side.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moelib.kernels.backend import run_on_backend
from moelib.kernels.gmm import tpu
from moelib.kernels.gmm.groups import row_ranges
from moelib.kernels.gmm.product import (
    BACKENDS,
    GmmOptions,
    WeightOptions,
    align_all,
    check_groups,
    check_operands,
    out_dtype,
    product,
    weight_gradient,
    widened,
)


def swiglu(gate: Float[Array, "*n"], up: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Returns silu(gate) * up.

    Source: Shazeer, arXiv:2002.05202.
    """
    return jax.nn.silu(gate) * up


def clamped_swiglu(
    gate: Float[Array, "*n"], up: Float[Array, "*n"], *, limit: float = 7.0, alpha: float = 1.702
) -> Float[Array, "*n"]:
    """Returns (up + 1) * gate * sigmoid(alpha * gate), gate clamped from above and up from both.

    Args:
        gate: The gate, clamped to at most `limit`.
        up: What is gated, clamped to from -limit to limit.
        limit: Where they are clamped.
        alpha: Of the sigmoid.

    Source: GPT-OSS; `GptOssExperts` in Hugging Face transformers, which has gate and up in turns.
    """
    gate = jnp.minimum(gate, limit)
    up = jnp.clip(up, -limit, limit)
    return (up + 1) * (gate * jax.nn.sigmoid(alpha * gate))


def gmm_activated(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "g k p n"],
    group_sizes: Int[Array, "s"],
    *,
    activation: Callable[..., Array],
    bias: Float[Array, "g p n"] | None = None,
    group_offset: Int[Array, ""] | int | None = None,
    backend: str | None = None,
    preferred_element_type: DTypeLike | None = None,
) -> Float[Array, "m n"]:
    """Returns `activation(lhs[i] @ rhs[g, :, 0], lhs[i] @ rhs[g, :, 1])` for row i of group g.

    The bias is added to each product. Rows of no group that rhs holds are zeros, whatever the
    activation makes of zeros, and have zero gradients. Differentiable in lhs, rhs and
    bias, in reverse mode, once; `gmm` and the activation can be any number of times.

    Args:
        lhs: The rows, sorted by group, as for `gmm`.
        rhs: p matrices for each group held. On TPUs store them as [g, k, p * n] and reshape: that
            is free, while an array that lies in memory as [g, k, p, n] is copied.
        group_sizes: As for `gmm`.
        activation: An elementwise function of p float32 arrays of one shape, such as `swiglu`. Give
            the same function again, not another made alike: it is compiled once for each.
        bias: p vectors for each group held.
        group_offset: As for `gmm`.
        backend: As for `gmm`.
        preferred_element_type: Dtype of the result; lhs's by default.

    Raises:
        ValueError: If the shapes disagree, group_sizes are not integers, the backend is unknown, or
            has no kernel for the dtype.
    """
    if rhs.ndim != 4:
        raise ValueError(f"gmm_activated: rhs {rhs.shape} is not [g, k, p, n].")
    g, _, p, n = rhs.shape
    check_operands("gmm_activated", lhs, rhs[:, :, 0], group_sizes, backend, transpose_rhs=False)
    offset = check_groups("gmm_activated", g, group_sizes, group_offset)
    if bias is not None and bias.shape != (g, p, n):
        raise ValueError(f"gmm_activated: bias {bias.shape} is not [g, p, n], {(g, p, n)}.")
    options = _Options(activation, backend, out_dtype(lhs, preferred_element_type))
    return _activated(options, *align_all(lhs, rhs, bias, group_sizes, offset))


class _Options(NamedTuple):
    activation: Callable[..., Array]
    backend: str | None
    out_dtype: Any


def _run(options: _Options, *operands: Any, save: bool) -> tuple[Array, Array | None]:
    """Returns (activated [m, n], products [p, m, n] if `save`)."""
    activation, backend, dtype = options
    lhs, rhs, bias, sizes, offset = operands
    if lhs.shape[1] == 0:
        lhs, rhs = widened(lhs, 1), widened(rhs, 1)
    wide = jnp.promote_types(lhs.dtype, rhs.dtype)
    kw = {"activation": activation, "save": save, "out_dtype": dtype}
    runs: dict[str, Callable[..., Any]] = {
        name: functools.partial(_by_parts, module, **kw) for name, module in BACKENDS.items()
    }
    # Compiled where it is the platform's own, and interpreted if it is asked for elsewhere.
    interpret = False if backend is None else None
    runs["tpu"] = functools.partial(tpu.gmm_activated, interpret=interpret, **kw)
    platforms = {"tpu": "tpu" if str(wide) in tpu.DTYPES else "xla", "default": "cpu"}
    inputs = lhs.astype(wide), rhs.astype(wide), sizes, bias, offset
    return run_on_backend("gmm_activated", backend, runs, platforms, *inputs)


def _by_parts(
    module: ModuleType,
    lhs: Array,
    rhs: Array,
    sizes: Array,
    bias: Array | None,
    offset: Array | None,
    *,
    activation: Callable[..., Array],
    save: bool,
    out_dtype: Any,
) -> tuple[Array, Array | None]:
    """Does it as a grouped matmul, whose products are rounded, and the activation."""
    m, (g, _, p, n) = lhs.shape[0], rhs.shape
    added = None if bias is None else bias.reshape(g, p * n)
    kw = {"transpose_rhs": False, "out_dtype": out_dtype}
    made = module.gmm(lhs, _flat(rhs), sizes, added, offset, **kw)
    parts = jnp.moveaxis(made.reshape(m, p, n), 1, 0)  # [p, m, n]
    out = activation(*parts.astype(jnp.float32)).astype(out_dtype)
    starts, ends = row_ranges(sizes, m, g, offset)
    rows = lax.iota(jnp.int32, m)[:, None]
    first, last = (starts[0], ends[-1]) if g else (0, 0)
    return jnp.where((rows >= first) & (rows < last), out, 0), parts if save else None


def _flat(rhs: Array) -> Array:
    """Returns the matrices in the columns of one for each group, [g, k, p * n]."""
    g, k, p, n = rhs.shape
    return rhs.reshape(g, k, p * n)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _activated(options: _Options, *operands: Any) -> Array:
    return _run(options, *operands, save=False)[0]


def _activated_forward(options: _Options, *operands: Any) -> tuple[Array, tuple[Any, ...]]:
    out, parts = _run(options, *operands, save=True)
    return out, (operands, parts)


def _activated_backward(
    options: _Options, saved: tuple[Any, ...], grad: Array
) -> tuple[Array | None, ...]:
    (lhs, rhs, bias, sizes, offset), parts = saved
    p, m, n = parts.shape
    _, pull = jax.vjp(lambda x: options.activation(*x), parts.astype(jnp.float32))
    (made,) = pull(grad.astype(jnp.float32))
    made = jnp.moveaxis(made.astype(parts.dtype), 0, 1).reshape(m, p * n)  # [m, p * n]
    turned = GmmOptions(True, options.backend, lhs.dtype)
    lhs_grad = product(turned, made, _flat(rhs), None, sizes, offset)
    bias_dtype = None if bias is None else bias.dtype
    weights = WeightOptions(rhs.shape[0], options.backend, rhs.dtype, bias_dtype)
    found = weight_gradient(weights, lhs, made, sizes, offset)
    if bias is None:
        return lhs_grad, found.reshape(rhs.shape), None, None, None
    return lhs_grad, found[0].reshape(rhs.shape), found[1].reshape(bias.shape), None, None


# Under remat the first pass then runs the kernel that writes no products; JAX can differentiate
# it only once for that.
_activated.defvjp(_activated_forward, _activated_backward, optimize_remat=True)
