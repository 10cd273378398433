"""The entry `gmm_activated`: gate and up of every expert in one grouped matmul, and activated.

On TPUs the kernel applies the activation to the float32 products before they leave VMEM, so [m, n]
is written instead of p times as much; the products too only if they will be differentiated.
Elsewhere it is a grouped matmul and then the activation.

Shapes: m rows, k in, n out, g groups held, s groups counted, p matrices of each group.
"""

import functools
import operator
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moelib.core.varying import align
from moelib.kernels.backend import run_on_backend
from moelib.kernels.gmm import cpu, gpu, tpu
from moelib.kernels.gmm.groups import row_ranges
from moelib.kernels.gmm.product import (
    BACKENDS,
    check_groups,
    check_operands,
    out_dtype,
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
    rhs: Float[Array, "g p k n"],
    group_sizes: Int[Array, "s"],
    *,
    activation: Callable[..., Array],
    bias: Float[Array, "g p n"] | None = None,
    group_offset: Int[Array, ""] | int | None = None,
    backend: str | None = None,
    preferred_element_type: DTypeLike | None = None,
    products_name: str | None = None,
) -> Float[Array, "m n"]:
    """Returns `activation(lhs[i] @ rhs[g, 0], lhs[i] @ rhs[g, 1])` for row i of group g.

    The bias is added to each product. Rows of no group that rhs holds are zeros, whatever the
    activation makes of zeros, and have zero gradients. Differentiable in lhs, rhs and
    bias, in reverse mode, once; `gmm` and the activation can be any number of times.

    Args:
        lhs: The rows, sorted by group, as for `gmm`.
        rhs: p matrices for each group held.
        group_sizes: As for `gmm`.
        activation: An elementwise function of p float32 arrays of one shape, such as `swiglu`. Give
            the same function again, not another made alike: it is compiled once for each.
        bias: p vectors for each group held.
        group_offset: As for `gmm`.
        backend: As for `gmm`.
        preferred_element_type: Dtype of the result; lhs's by default.
        products_name: A name under which a policy of `jax.checkpoint` keeps the result and the p
            products [m, n]. Without, a forward pass under `jax.checkpoint` never writes the latter.

    Raises:
        ValueError: As `gmm`.
    """
    if rhs.ndim != 4:
        raise ValueError(f"gmm_activated: rhs {rhs.shape} is not [g, p, k, n].")
    g, p, _, n = rhs.shape
    check_operands("gmm_activated", lhs, rhs[:, 0], group_sizes, backend, transpose_rhs=False)
    sizes, offset = check_groups("gmm_activated", g, group_sizes, group_offset)
    if bias is not None and bias.shape != (g, p, n):
        raise ValueError(f"gmm_activated: bias {bias.shape} is not [g, p, n], {(g, p, n)}.")
    dtype = out_dtype(lhs, preferred_element_type)
    options = _Options(activation, backend, dtype, products_name)
    run = _activated if products_name is None else _activated_by_name
    return run(options, *align(lhs, rhs, bias, sizes, offset))


class _Options(NamedTuple):
    activation: Callable[..., Array]
    backend: str | None
    out_dtype: Any
    products_name: str | None


def _run(
    name: str,
    options: _Options,
    sides: tuple[int, int],
    other: Callable[..., Any],
    *operands: Any,
    **kw: Any,
) -> Any:
    """Runs the TPU's kernel of this name, or `other(backend's module, ...)` elsewhere.

    `sides` are k and n.
    """
    lhs, rhs, *rest = operands
    dtype = jnp.result_type(*jax.tree.leaves((lhs, rhs)))
    runs: dict[str, Callable[..., Any]] = {
        key: functools.partial(other, module, **kw) for key, module in BACKENDS.items()
    }
    # Compiled where it is the platform's own, and interpreted if it is asked for elsewhere.
    interpret = False if options.backend is None else None
    runs["tpu"] = functools.partial(getattr(tpu, name), interpret=interpret, **kw)
    runs["gpu"] = functools.partial(runs["gpu"], interpret=interpret)
    platforms = {"tpu": "tpu" if str(dtype) in tpu.DTYPES else "xla", "default": "cpu"}
    platforms |= gpu.default_on_cuda(name, dtype, sides, kw["out_dtype"])
    inputs = *jax.tree.map(lambda x: x.astype(dtype), (lhs, rhs)), *rest
    return run_on_backend("gmm_activated", options.backend, runs, platforms, *inputs)


def _forward(options: _Options, *operands: Any, save: bool) -> tuple[Array, tuple[Array, ...]]:
    """Returns (activated [m, n], p products [m, n] if `save`)."""
    lhs, rhs, bias, sizes, offset = operands
    if lhs.shape[1] == 0:
        lhs, rhs = widened(lhs, 1), widened(rhs, 2)
    kw = {"activation": options.activation, "save": save, "out_dtype": options.out_dtype}
    return _run(
        "gmm_activated",
        options,
        rhs.shape[2:],
        _activated_parts,
        lhs,
        rhs,
        sizes,
        bias,
        offset,
        **kw,
    )


def _activated_parts(
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
    **options: Any,
) -> tuple[Array, tuple[Array, ...]]:
    """Does it as one grouped matmul a part, whose products are rounded, and the activation."""
    kw = {"transpose_rhs": False, "out_dtype": out_dtype, **options}
    parts = tuple(
        _part(module, i, lhs, rhs, sizes, None if bias is None else bias[:, i], offset, **kw)
        for i in range(rhs.shape[1])
    )
    out = activation(*(part.astype(jnp.float32) for part in parts)).astype(out_dtype)
    starts, ends = row_ranges(sizes, m := lhs.shape[0], g := rhs.shape[0], offset)
    rows = lax.iota(jnp.int32, m)[:, None]
    first, last = (starts[0], ends[-1]) if g else (0, 0)
    return jnp.where((rows >= first) & (rows < last), out, 0), parts if save else ()


def _part(
    module: ModuleType, i: int, lhs: Array, rhs: Array, sizes: Array, *operands: Any, **kw: Any
) -> Array:
    """Returns the grouped matmul with the i-th matrix of each group."""
    if module is cpu:
        return cpu.gmm(lhs, rhs, sizes, *operands, part=i, **kw)
    return module.gmm(lhs, rhs[:, i], sizes, *operands, **kw)


def _summed_parts(
    module: ModuleType,
    lhs: tuple[Array, ...],
    rhs: Array,
    sizes: Array,
    offset: Array | None,
    *,
    out_dtype: Any,
    **options: Any,
) -> Array:
    """Returns the sum over p of `lhs[p] @ rhs[:, p]^T`, by group."""
    kw = {"transpose_rhs": True, "out_dtype": jnp.float32, **options}
    parts = [_part(module, i, rows, rhs, sizes, None, offset, **kw) for i, rows in enumerate(lhs)]
    return functools.reduce(operator.add, parts).astype(out_dtype)


def _weight_gradient_parts(
    module: ModuleType,
    lhs: Array,
    grads: tuple[Array, ...],
    sizes: Array,
    offset: Array | None,
    **kw: Any,
) -> Any:
    """Returns the gradients of the p matrices of each group, and of their biases if wanted."""
    made = [module.gmm_weight_gradient(lhs, grad, sizes, offset, **kw) for grad in grads]
    return jax.tree.map(lambda *x: jnp.stack(x, 1), *made)


def _value(options: _Options, *operands: Any) -> Array:
    return _forward(options, *operands, save=False)[0]


def _value_and_saved(options: _Options, *operands: Any) -> tuple[Array, tuple[Any, ...]]:
    out, parts = _forward(options, *operands, save=True)
    if options.products_name is not None:
        out, *parts = (checkpoint_name(x, options.products_name) for x in (out, *parts))
    return out, (operands, parts)


def _backward(options: _Options, saved: tuple[Any, ...], grad: Array) -> tuple[Array | None, ...]:
    (lhs, rhs, bias, sizes, offset), parts = saved
    _, pull = jax.vjp(options.activation, *(part.astype(jnp.float32) for part in parts))
    made = tuple(x.astype(grad.dtype) for x in pull(grad.astype(jnp.float32)))  # p of [m, n]
    kw = {"out_dtype": lhs.dtype}
    lhs_grad = _run(
        "gmm_summed",
        options,
        (rhs.shape[2], rhs.shape[3]),
        _summed_parts,
        made,
        rhs,
        sizes,
        offset,
        **kw,
    )
    bias_dtype = None if bias is None else bias.dtype
    kw = {"out_dtype": rhs.dtype, "num_groups": rhs.shape[0], "bias_dtype": bias_dtype}
    rows = widened(lhs, 1) if lhs.shape[1] == 0 else lhs
    inputs = rows, made, sizes, offset
    found = _run(
        "gmm_weight_gradients",
        options,
        (rhs.shape[2], rhs.shape[3]),
        _weight_gradient_parts,
        *inputs,
        **kw,
    )
    rhs_grad, bias_grad = (found, None) if bias is None else found
    return lhs_grad, rhs_grad[:, :, : lhs.shape[1]], bias_grad, None, None


# Under remat the first pass then runs the kernel that writes no products; JAX can differentiate
# it only once for that, and sees no name in it.
_activated = jax.custom_vjp(_value, nondiff_argnums=(0,))
_activated.defvjp(_value_and_saved, _backward, optimize_remat=True)
_activated_by_name = jax.custom_vjp(_value, nondiff_argnums=(0,))
_activated_by_name.defvjp(_value_and_saved, _backward)
