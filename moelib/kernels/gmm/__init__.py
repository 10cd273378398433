"""Grouped matmul: rows sorted by group, times one matrix (or several) per group.

    out = gmm(lhs, rhs, group_sizes)
    d lhs = gmm_input_gradient(d out, rhs, group_sizes)
    d rhs = gmm_weight_gradient(lhs, d out, group_sizes)

The last two are the parts of the backward pass of `gmm`, for schedules that defer weight gradients.
`gmm_activated` multiplies by several matrices of each group (gate and up) and joins their products
by an activation; on TPUs the kernel activates the float32 products before they leave VMEM, so that
[m, n] is written instead of p times as much, and the products only if they will be differentiated.

With several devices the kernels belong inside `jax.shard_map`: XLA does not partition them.

On TPUs our kernels are the default instead of `lax.ragged_dot`, which writes every result in
float32, to be masked and cast by another pass: for 4096 rows of 8 groups, k = n = 2048, in bfloat16
on v6e, 102 us by the compiler's count of bytes instead of 61, and 225 instead of 61 for the weight
gradient. On other platforms `ragged_dot` does g times the work.

Shapes: m rows, k in, n out, g groups, p matrices per group.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moelib.core.varying import align
from moelib.kernels import backend as backends
from moelib.kernels.gmm import gpu, reference, tpu, xla
from moelib.kernels.operands import check_dtypes, check_shapes

__all__ = ["gmm", "gmm_activated", "gmm_input_gradient", "gmm_weight_gradient"]


def gmm(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "g k n"],
    group_sizes: Int[Array, "g"],
    *,
    bias: Float[Array, "g n"] | None = None,
    backend: str | None = None,
) -> Float[Array, "m n"]:
    """Returns `lhs[i] @ rhs[group of row i]`, in the operands' dtype; zeros for rows of no group.

    The first `group_sizes[0]` rows are the first group's, and so on. Rows past the sum of the group
    sizes belong to no group: they give zeros, have zero gradients, and may hold anything. Products
    are summed in float32. Differentiable in lhs, rhs and bias, in reverse mode, once; for second
    derivatives take the backend "reference".

    Args:
        lhs: Rows, sorted by group.
        rhs: One matrix per group.
        group_sizes: Number of rows of each group, none below 0. Rows counted past m do not exist.
        bias: One vector per group, added to the results of its rows.
        backend: "tpu" (Pallas kernels for bfloat16 and float32; the default on TPUs), "gpu" (Pallas
            kernels for Hopper, for bfloat16 and float16 with k and n multiples of 64; the default
            there), "xla" (loops over blocks of rows; the default elsewhere), or "reference". None
            takes the one that `moelib.kernels.backend` names.

    Raises:
        ValueError: If the shapes or dtypes disagree, a size is 0, or the backend is unknown
            or cannot take the operands.
    """
    options = _Options(None, backends.chosen_backend("gmm", backend), None)
    operands = {"lhs": lhs, "rhs": rhs, "group_sizes": group_sizes, "bias": bias}
    backends.record("gmm", gmm, operands)
    bias = None if bias is None else bias[:, None]
    return _entry("gmm", options, lhs, rhs[:, None], group_sizes, bias)


def gmm_activated(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "g p k n"],
    group_sizes: Int[Array, "g"],
    *,
    activation: Callable[..., Array],
    bias: Float[Array, "g p n"] | None = None,
    backend: str | None = None,
    products_name: str | None = None,
) -> Float[Array, "m n"]:
    """Returns `activation(lhs[i] @ rhs[g, 0], lhs[i] @ rhs[g, 1])` for row i of group g.

    Rows of no group are zeros, whatever the activation of zeros is. Otherwise, and in its errors,
    it is as `gmm`.

    Args:
        lhs: Rows, sorted by group.
        rhs: p matrices per group.
        group_sizes: Number of rows of each group.
        activation: Elementwise function of p float32 arrays of one shape. Pass the same function
            object each time: kernels are compiled once for each.
        bias: p vectors per group, added to the products.
        backend: One of the backends of `gmm`.
        products_name: Name under which a policy of `jax.checkpoint` saves the result and the p
            products [m, n]. Without it, a forward pass under `jax.checkpoint` never writes the
            products.
    """
    options = _Options(activation, backends.chosen_backend("gmm", backend), products_name)
    operands = {"lhs": lhs, "rhs": rhs, "group_sizes": group_sizes, "bias": bias}
    backends.record("gmm", gmm_activated, operands, activation=activation)
    return _entry("gmm_activated", options, lhs, rhs, group_sizes, bias)


def gmm_input_gradient(
    grad: Float[Array, "m n"],
    rhs: Float[Array, "g k n"],
    group_sizes: Int[Array, "g"],
    *,
    backend: str | None = None,
) -> Float[Array, "m k"]:
    """Returns `grad[i] @ rhs[group of row i]^T`, the gradient of `gmm` in lhs; not differentiable.

    `grad` is the gradient of the result; the other arguments and the errors are those of `gmm`.
    """
    shapes = {"grad": (grad, "mn"), "rhs": (rhs, "gkn"), "group_sizes": (group_sizes, "g")}
    check_shapes("gmm_input_gradient", shapes)
    check_dtypes("gmm_input_gradient", {"grad": grad, "rhs": rhs}, {"group_sizes": group_sizes})
    grad, rhs, group_sizes = align(grad, rhs, group_sizes)
    backend = backends.chosen_backend("gmm", backend)
    return _run("input_gradient", backend, rhs.shape[1:], (grad,), rhs[:, None], group_sizes)


def gmm_weight_gradient(
    lhs: Float[Array, "m k"],
    grad: Float[Array, "m n"],
    group_sizes: Int[Array, "g"],
    *,
    backend: str | None = None,
) -> Float[Array, "g k n"]:
    """Returns the sum of `lhs[i]^T grad[i]` over the rows i of each group; not differentiable.

    It is the gradient of `gmm` in rhs, zeros for groups without rows. `grad` is the gradient of the
    result; the other arguments and the errors are those of `gmm`.
    """
    shapes = {"lhs": (lhs, "mk"), "grad": (grad, "mn"), "group_sizes": (group_sizes, "g")}
    check_shapes("gmm_weight_gradient", shapes)
    check_dtypes("gmm_weight_gradient", {"lhs": lhs, "grad": grad}, {"group_sizes": group_sizes})
    rhs = jax.ShapeDtypeStruct((len(group_sizes), lhs.shape[1], grad.shape[1]), lhs.dtype)
    backends.record("gmm", gmm, {"lhs": lhs, "rhs": rhs, "group_sizes": group_sizes})
    lhs, grad, group_sizes = align(lhs, grad, group_sizes)
    backend = backends.chosen_backend("gmm", backend)
    sides, operands = (lhs.shape[1], grad.shape[1]), (lhs, (grad,), group_sizes)
    return _run("weight_gradient", backend, sides, *operands, with_sums=False)[0][:, 0]


class _Options(NamedTuple):
    activation: Callable[..., Array] | None
    backend: str | None
    products_name: str | None


def _entry(
    kernel: str, options: _Options, lhs: Array, rhs: Array, sizes: Array, bias: Array | None
) -> Array:
    floats = {"lhs": lhs, "rhs": rhs, "bias": bias}
    dims = {"lhs": "mk", "rhs": "gpkn", "bias": "gpn", "group_sizes": "g"}
    shapes = {name: (x, dims[name]) for name, x in {**floats, "group_sizes": sizes}.items()}
    check_shapes(kernel, shapes)
    check_dtypes(kernel, floats, {"group_sizes": sizes})
    operands = align(lhs, rhs, sizes, bias)
    if options.backend == "reference":
        return _value(options, *operands)
    if options.activation is None or options.products_name is not None:
        return _product(options, *operands)
    return _product_under_remat(options, *operands)


# ------------------------------------------------------------------------------------------------
# Choice of backend


def _run(
    part: str, backend: str | None, sides: tuple[int, int], *operands: Any, **options: Any
) -> Any:
    """Runs a backend's "forward", "input_gradient" or "weight_gradient"; the sides are k and n.

    Raises:
        UserError: If the backend cannot take the operands.
    """
    dtype = jax.tree.leaves(operands)[0].dtype
    platform = backends.current_device().platform
    reasons = {"tpu": tpu.reason_against(dtype)}
    if "gpu" in (backend, platform):  # Elsewhere, tracing the kernel would import Mosaic-GPU.
        reasons["gpu"] = gpu.reason_against(dtype, sides)
    if backend is None and platform == "tpu" and reasons["tpu"]:
        backend = "tpu"  # Refused: plain XLA is no default there.
    modules = {"reference": reference, "tpu": tpu, "xla": xla, "gpu": gpu}
    forms = {
        name: functools.partial(getattr(module, part), **options)
        for name, module in modules.items()
    }
    return backends.run("gmm", backend, forms, reasons, *operands)


# ------------------------------------------------------------------------------------------------
# Derivatives


def _forward(options: _Options, *operands: Any, save: bool) -> tuple[Array, tuple[Array, ...]]:
    """Returns (result [m, n], p products [m, n] if `save`)."""
    sides = operands[1].shape[2:]
    kw = {"activation": options.activation, "save": save}
    return _run("forward", options.backend, sides, *operands, **kw)


def _value(options: _Options, *operands: Any) -> Array:
    return _forward(options, *operands, save=False)[0]


def _value_and_saved(options: _Options, *operands: Any) -> tuple[Array, tuple[Any, ...]]:
    out, products = _forward(options, *operands, save=options.activation is not None)
    if options.products_name is not None:
        out, *products = (checkpoint_name(x, options.products_name) for x in (out, *products))
    return out, (operands, products)


def _backward(options: _Options, saved: tuple[Any, ...], grad: Array) -> tuple[Array | None, ...]:
    (lhs, rhs, sizes, bias), products = saved
    if products and backends.current_device().platform == "cpu":
        # Otherwise XLA may compute the derivative in the forward pass, and hold it until here.
        products, grad = lax.optimization_barrier((products, grad))
    grads = (grad,)
    if options.activation is not None:
        _, pull = jax.vjp(options.activation, *(x.astype(jnp.float32) for x in products))
        grads = tuple(x.astype(grad.dtype) for x in pull(grad.astype(jnp.float32)))
    at = options.backend, rhs.shape[2:]
    lhs_grad = _run("input_gradient", *at, grads, rhs, sizes)
    has_bias = bias is not None
    rhs_grad, bias_grad = _run("weight_gradient", *at, lhs, grads, sizes, with_sums=has_bias)
    return lhs_grad, rhs_grad, None, bias_grad


_product = jax.custom_vjp(_value, nondiff_argnums=(0,))
_product.defvjp(_value_and_saved, _backward)
# Under remat, the forward pass of this one runs the kernel that writes no products. JAX therefore
# differentiates it only once, and sees no name in it.
_product_under_remat = jax.custom_vjp(_value, nondiff_argnums=(0,))
_product_under_remat.defvjp(_value_and_saved, _backward, optimize_remat=True)
