"""Grouped matmul for TPUs: Pallas kernels that visit each tile of rows once for each of its groups.

The grid has as many steps as there are visits, counted at run time: a tile without rows of a group
is filled with zeros, and neither it nor an empty group is read or multiplied. A group's matrix,
whole in k if it fits, stays in VMEM from the group's first visit to its last. A visit in which all
rows of the tile are the group's own multiplies them at once; any other multiplies only the blocks
of `Tiles.sub_m` rows in which the group has rows.

Shapes: m rows, k in, n out, g groups held, s groups counted, p matrices of each group.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moelib.core.varying import varying_axes, zeros_like_varying
from moelib.kernels.gmm.tiles import Tiles
from moelib.kernels.gmm.tpu_gradient import weight_gradient
from moelib.kernels.gmm.tpu_product import product

DTYPES = ("bfloat16", "float32")


def gmm(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "g ..."],
    group_sizes: Int[Array, "s"],
    bias: Float[Array, "g n"] | None = None,
    group_offset: Int[Array, ""] | None = None,
    *,
    transpose_rhs: bool,
    out_dtype: DTypeLike,
    tiles: Tiles | None = None,
    interpret: Any = None,
) -> Float[Array, "m n"]:
    """Returns `lhs[i] @ rhs[group of row i]` plus its bias, zeros for rows of no group held.

    Args:
        lhs: The rows, sorted by group.
        rhs: A matrix for each group held, [g, k, n]; [g, n, k] if `transpose_rhs`.
        group_sizes: Number of rows of each group.
        bias: A vector for each group held.
        group_offset: The first group held; 0 by default.
        transpose_rhs: Whether to multiply by the transposes.
        out_dtype: Dtype of the result.
        tiles: Chosen by `tiles.choose` by default.
        interpret: What `pl.pallas_call` is given; by default the kernel is compiled for a TPU and
            interpreted elsewhere.

    Raises:
        ValueError: If the kernel has no such dtype.
    """
    n = rhs.shape[1 if transpose_rhs else 2]
    if 0 in (lhs.shape[0], n, rhs.shape[0]):
        return zeros_like_varying((lhs.shape[0], n), out_dtype, lhs)
    run = functools.partial(
        product,
        activation=None,
        save=False,
        transpose_rhs=transpose_rhs,
        out_dtype=out_dtype,
        tiles=tiles,
    )
    biases = None if bias is None else bias[:, None]
    return _on_platform(run, interpret, (lhs,), rhs[:, None], biases, group_sizes, group_offset)[0]


def gmm_activated(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "g p k n"],
    group_sizes: Int[Array, "s"],
    bias: Float[Array, "g p n"] | None = None,
    group_offset: Int[Array, ""] | None = None,
    *,
    activation: Callable[..., Array],
    save: bool,
    out_dtype: DTypeLike,
    tiles: Tiles | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "m n"], tuple[Float[Array, "m n"], ...]]:
    """Returns the activation of p products of each row, and, if `save`, the products themselves.

    All are zeros for rows of no group held. Arguments are as for `gmm`.

    Args:
        lhs: The rows, sorted by group.
        rhs: p matrices for each group held.
        group_sizes: Number of rows of each group.
        bias: p vectors for each group held.
        group_offset: The first group held; 0 by default.
        activation: Elementwise, of p arrays in float32.
        save: Whether to return the products, in `out_dtype`.
        out_dtype: Dtype of the result.
        tiles: Chosen by `tiles.choose` by default.
        interpret: As for `gmm`.

    Raises:
        ValueError: If the kernel has no such dtype.
    """
    g, p, _, n = rhs.shape
    m = lhs.shape[0]
    if 0 in (m, n, g):
        zeros = zeros_like_varying((m, n), out_dtype, lhs)
        return zeros, (zeros,) * (p if save else 0)
    run = functools.partial(
        product,
        activation=activation,
        save=save,
        transpose_rhs=False,
        out_dtype=out_dtype,
        tiles=tiles,
    )
    out = _on_platform(run, interpret, (lhs,), rhs, bias, group_sizes, group_offset)
    return out[0], tuple(out[1:])


def gmm_summed(
    lhs: tuple[Float[Array, "m n"], ...],
    rhs: Float[Array, "g p k n"],
    group_sizes: Int[Array, "s"],
    group_offset: Int[Array, ""] | None = None,
    *,
    out_dtype: DTypeLike,
    tiles: Tiles | None = None,
    interpret: Any = None,
) -> Float[Array, "m k"]:
    """Returns the sum over p of `lhs[p][i] @ rhs[group of row i, p]^T`.

    The gradient of `gmm_activated` in its rows, from that in its products. Arguments are as for it.
    """
    m, (g, _, k, _) = lhs[0].shape[0], rhs.shape
    if 0 in (m, k, g):
        return zeros_like_varying((m, k), out_dtype, lhs[0])
    run = functools.partial(
        product, activation=_sum, save=False, transpose_rhs=True, out_dtype=out_dtype, tiles=tiles
    )
    return _on_platform(run, interpret, lhs, rhs, None, group_sizes, group_offset)[0]


def _sum(*parts: Array) -> Array:
    return functools.reduce(operator.add, parts)


def gmm_weight_gradient(
    lhs: Float[Array, "m k"],
    grad: Float[Array, "m n"],
    group_sizes: Int[Array, "s"],
    group_offset: Int[Array, ""] | None = None,
    **options: Any,
) -> Float[Array, "g k n"] | tuple[Float[Array, "g k n"], Float[Array, "g n"]]:
    """Returns `gmm_weight_gradients` of one grad, without the dimension p."""
    made = gmm_weight_gradients(lhs, (grad,), group_sizes, group_offset, **options)
    return jax.tree.map(lambda x: x[:, 0], made)


def gmm_weight_gradients(
    lhs: Float[Array, "m k"],
    grads: tuple[Float[Array, "m n"], ...],
    group_sizes: Int[Array, "s"],
    group_offset: Int[Array, ""] | None = None,
    *,
    out_dtype: DTypeLike,
    num_groups: int | None = None,
    bias_dtype: DTypeLike | None = None,
    tiles: Tiles | None = None,
    interpret: Any = None,
) -> Float[Array, "g p k n"] | tuple[Float[Array, "g p k n"], Float[Array, "g p n"]]:
    """Returns the sum of `lhs[i]^T grads[p][i]` over the rows i of each group held, for every p.

    Args:
        lhs: The rows, sorted by group.
        grads: p arrays of as many rows.
        group_sizes: Number of rows of each group.
        group_offset: The first group held; 0 by default.
        out_dtype: Dtype of the result.
        num_groups: Number of groups held; all by default.
        bias_dtype: If given, the sums of grads over the rows of each group are returned too.
        tiles: Chosen by `tiles.choose` by default.
        interpret: As for `gmm`.

    Raises:
        ValueError: If the kernel has no such dtype.
    """
    g = len(group_sizes) if num_groups is None else num_groups
    (m, k), n, p = lhs.shape, grads[0].shape[1], len(grads)
    if 0 in (m, k, n, g):
        zeros = zeros_like_varying((g, p, k, n), out_dtype, lhs)
        if bias_dtype is None:
            return zeros
        return zeros, zeros_like_varying((g, p, n), bias_dtype, lhs)
    run = functools.partial(
        weight_gradient, num_groups=g, out_dtype=out_dtype, bias_dtype=bias_dtype, tiles=tiles
    )
    return _on_platform(run, interpret, lhs, grads, group_sizes, group_offset)


def _on_platform(run: Callable[..., Any], interpret: Any, *operands: Any) -> Any:
    dtype = jax.tree.leaves(operands)[0].dtype
    if str(dtype) not in DTYPES:
        raise ValueError(
            f"gmm on TPUs has no kernel for {dtype}; cast to one of {', '.join(DTYPES)}, "
            "or set backend='xla'."
        )
    if interpret is not None:
        return run(*operands, interpret=interpret)
    compiled = functools.partial(run, interpret=False)
    interpreted = functools.partial(_interpreted, functools.partial(run, interpret=True))
    return lax.platform_dependent(*operands, tpu=compiled, default=interpreted)


def _interpreted(run: Callable[..., Any], *operands: Any) -> Any:
    """Returns `run(*operands)`, in which arrays that vary over mesh axes do not.

    JAX's interpreter of kernels cannot mix what varies and what does not, so every device runs all
    devices' kernels, and takes its own result.
    """
    axes = tuple(sorted(varying_axes(jax.tree.leaves(operands)[0])))
    if not axes:
        return run(*operands)
    index, size = lax.axis_index(axes), lax.axis_size(axes)

    def everyones(array: Array) -> Array:
        places = zeros_like_varying((size, *array.shape), array.dtype, array)
        return lax.psum(lax.dynamic_update_index_in_dim(places, array, index, axis=0), axes)

    made = lax.map(lambda x: run(*x), jax.tree.map(everyones, operands))
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), made)
