"""Matmuls of quantized operands: activations in blocks of 1 x 128, weights in blocks of 128 x 128.

| matmul | of activations | first operand | second operand |
|---|---|---|---|
| y = x w | all | x 1 x 128 | w 128 x 128 |
| d x = d y w^T | all | d y 1 x 128 | w 128 x 128, the same values |
| d w = x^T d y | dense | x 128 x 128 | d y 128 x 1, along tokens |
| d w = x^T d y | of experts | x 128 x 1, along rows | d y 128 x 1, along rows |

Blocks along tokens are those of one sequence, so that the mesh and the number of micro-batches
change no dense product; schemes with one scale per array take that of a whole micro-batch. Rows of
experts are in blocks of 128 from the first row of all experts; a block with rows of two experts has
one scale. Products are summed in float32. The gradient of a weight is
straight through: that of the quantized weight. A scheme may give d y another dtype: `FP8_TENSOR`
has E5M2 for it, and E4M3 for x and w.

Matmuls of experts multiply the exact bfloat16 or float32 values of the operands in the kernels of
`moelib.kernels.gmm`.

Shapes: b sequences or groups, t tokens, k in, n out, m rows, g groups.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moelib.core.varying import align
from moelib.kernels import backend as backends
from moelib.kernels.gmm import gmm, gmm_input_gradient, gmm_weight_gradient
from moelib.kernels.quantized_matmul import float8, reference, xla
from moelib.kernels.quantized_matmul.quantize import (
    BLOCK,
    COLUMNS,
    ROWS,
    TILES,
    Quantization,
    Quantized,
    quantize,
)

__all__ = [
    "BLOCK",
    "TILES",
    "Quantization",
    "Quantized",
    "quantize",
    "quantized_gmm",
    "quantized_matmul",
]

# Kinds of devices that multiply 8-bit floats faster than bfloat16.
_FLOAT8_UNITS = ("TPU7x", "NVIDIA H", "NVIDIA GH", "NVIDIA B", "NVIDIA GB", "NVIDIA L4")


def quantized_matmul(
    x: Float[Array, "b t k"],
    weight: Quantized,
    gradient_of: Float[Array, "..."],
    *,
    split: jax.P | None = None,
    sums_in_float32: bool = False,
    backend: str | None = None,
) -> Float[Array, "b t n"]:
    """Returns x w in the dtype of x, both quantized by the scheme of the weight.

    Args:
        x: Activations. Gradients of the result are quantized, too.
        weight: A matrix [k, n], or one for each of the b groups [b, k, n].
        gradient_of: Array of the weight's shape that takes its gradient; its values are not read.
        split: Sharding of the weight while it is multiplied; its 8-bit values are gathered for it,
            and again in the backward pass. None leaves both to the compiler.
        sums_in_float32: Whether the gradient of the weight is rounded to the dtype of x only after
            devices have summed it.
        backend: "xla" multiplies the exact values in the dtype of x; "float8" multiplies 8-bit
            operands of schemes with one scale per array, and is their default on devices with such
            units; "reference" multiplies in float32; "straight_through" does, too, and quantizes no
            gradients, for comparison. None takes the one that `moelib.kernels.backend` names.

    Raises:
        UserError: If `backend` is "float8" and the scheme has a scale per block.
    """
    # The batch is that of all devices here; that of one differs from it in sequences only.
    of_one = x if weight.values.ndim == 3 else jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype)
    operands = {"x": of_one, "weight": gradient_of}
    backends.record("quantized_matmul", matmul_of_quantized, operands, scheme=weight.scheme)
    backend = backends.chosen_backend("quantized_matmul", backend)
    if backend is None:
        native = backends.current_device().kind.startswith(_FLOAT8_UNITS)
        in_one = not weight.scheme.format.in_blocks
        backend = "float8" if native and in_one else "xla"
    x, weight, gradient_of = align(x, weight, gradient_of.astype(x.dtype))
    if backend == "straight_through":
        return _straight_through(x, weight, gradient_of)
    options = _Dense(backend, weight.values.ndim == 3, split, sums_in_float32)
    return _dense(options, x, weight, gradient_of)


def matmul_of_quantized(
    x: Float[Array, "b t k"], weight: Float[Array, "..."], *, scheme: Quantization
) -> Float[Array, "b t n"]:
    """Returns `quantized_matmul` by a weight that is quantized here."""
    quantized = quantize(jax.lax.stop_gradient(weight), TILES, scheme)
    return quantized_matmul(x, quantized, weight)


def quantized_gmm(
    rows: Float[Array, "m k"],
    weight: Quantized,
    gradient_of: Float[Array, "g k n"],
    group_sizes: Int[Array, "g"],
    *,
    backend: str | None = None,
) -> Float[Array, "m n"]:
    """Returns `gmm(rows, w, group_sizes)`, both quantized by the scheme of the weight [g, k, n].

    `backend` is one of those of `gmm`, unless that of `quantized_matmul` is "straight_through".
    """
    given = align(rows, weight, gradient_of.astype(rows.dtype), group_sizes)
    if backends.chosen_backend("quantized_matmul") == "straight_through":
        rows, *others = given
        return _straight_through(_of_groups(rows, group_sizes), *others)
    return _grouped(backend, *given)


def _straight_through(*operands: Any) -> Array:
    forms = {"straight_through": reference.straight_through}
    return backends.run("quantized_matmul", "straight_through", forms, {}, *operands)


# -- Dense -----------------------------------------------------------------------------------------


class _Dense(NamedTuple):
    backend: str
    has_groups: bool  # Whether each of the b groups has a weight.
    split: jax.P | None
    sums_in_float32: bool

    def of_weight(self, spec: str, x: Quantized, weight: Quantized, dtype: Any) -> Array:
        """Returns an einsum of a quantized array and the weight, as it is sharded then."""
        weight = weight if self.split is None else weight.gathered(self.split)
        return self.dot(spec, x, weight, dtype)

    def dot(self, spec: str, a: Quantized, b: Quantized, dtype: Any, values: Any = None) -> Array:
        """Returns an einsum of quantized arrays, in which "w" stands for the weight's dimensions.

        `values` is the dtype in which plain XLA multiplies; None for that of the result.

        The forward pass and both gradients are dots of their own, so that they can be scheduled
        apart.
        """
        spec = spec.replace("w", "bkn" if self.has_groups else "kn")
        modules = {"float8": float8, "reference": reference, "xla": xla}
        forms: dict[str, Any] = {
            name: functools.partial(module.dot, spec, dtype=dtype)
            for name, module in modules.items()
        }
        forms["xla"] = functools.partial(xla.dot, spec, dtype=dtype, values=values)
        scheme = a.scheme.name if a.scheme.format.in_blocks else None
        reason = scheme and f"has no dots with a scale per block, as {scheme}; set FP8_TENSOR."
        return backends.run("quantized_matmul", self.backend, forms, {"float8": reason}, a, b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dense(options: _Dense, x: Array, weight: Quantized, gradient_of: Array) -> Array:
    del gradient_of
    return options.of_weight("btk,w->btn", quantize(x, ROWS, weight.scheme), weight, x.dtype)


def _dense_forward(options: _Dense, x: Array, weight: Quantized, gradient_of: Array) -> Any:
    return _dense(options, x, weight, gradient_of), (x, weight)


def _dense_backward(options: _Dense, saved: Any, grad: Array) -> Any:
    x, weight = saved
    of_grad = functools.partial(quantize, grad, scheme=weight.scheme, is_gradient=True)
    x_grad = options.of_weight("btn,w->btk", of_grad(ROWS), weight, x.dtype)
    x = quantize(x, COLUMNS if options.has_groups else TILES, weight.scheme)
    sums = jnp.float32 if options.sums_in_float32 else x_grad.dtype
    weight_grad = options.dot("btk,btn->w", x, of_grad(COLUMNS), sums, x_grad.dtype)
    return x_grad, None, weight_grad.astype(x_grad.dtype)


_dense.defvjp(_dense_forward, _dense_backward)


# -- Grouped ---------------------------------------------------------------------------------------


def _of_groups(rows: Array, sizes: Array) -> Array:
    """Returns the rows with zeros in those of no group, which may hold anything.

    They share scales with others: that of a block of rows, or the one of an array.
    """
    return jnp.where((jnp.arange(len(rows)) < jnp.sum(sizes))[:, None], rows, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(
    backend: str | None, rows: Array, weight: Quantized, gradient_of: Array, sizes: Array
) -> Array:
    del gradient_of
    quantized = quantize(_of_groups(rows, sizes), ROWS, weight.scheme)
    exact = xla.exact(quantized, rows.dtype), xla.exact(weight, rows.dtype)
    y = gmm(*exact, sizes, backend=backend)
    return y.astype(rows.dtype)


def _grouped_forward(
    backend: str | None, rows: Array, weight: Quantized, gradient_of: Array, sizes: Array
) -> Any:
    return _grouped(backend, rows, weight, gradient_of, sizes), (rows, weight, sizes)


def _grouped_backward(backend: str | None, saved: Any, grad: Array) -> Any:
    rows, weight, sizes = saved
    dtype, of = rows.dtype, {"group_sizes": sizes, "backend": backend}
    rows, grad = _of_groups(rows, sizes), _of_groups(grad, sizes)
    of_grad = functools.partial(quantize, grad, scheme=weight.scheme, is_gradient=True)
    by_row, by_column = (xla.exact(of_grad(block), dtype) for block in (ROWS, COLUMNS))
    rows = xla.exact(quantize(rows, COLUMNS, weight.scheme), dtype)
    rows_grad = gmm_input_gradient(by_row, xla.exact(weight, dtype), **of)
    weight_grad = gmm_weight_gradient(rows, by_column, **of)
    return rows_grad.astype(dtype), None, weight_grad.astype(dtype), None


_grouped.defvjp(_grouped_forward, _grouped_backward)
