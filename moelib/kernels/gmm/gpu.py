"""Grouped matmul for Hopper GPUs (H100, H200): Mosaic-GPU kernels on their tensor cores.

A group's matrix meets only the windows of 64 rows that hold its rows, and nothing is sorted, padded
or copied. The tensor cores' instruction (`wgmma`) takes 16-bit floats and sums in float32, and the
copy engine (TMA) moves whole 128 bytes of a row, so k and n are multiples of 64. Mosaic-GPU is
imported where it is used, because that takes a second.

Shapes: m rows, k in, n out, g groups, p matrices per group.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moelib.core.varying import align
from moelib.kernels import hopper
from moelib.kernels.gmm.gpu_tiles import GpuTiles, choose, choose_for_gradient
from moelib.kernels.gmm.groups import activated
from moelib.kernels.hopper import SIDE

_INTERPRETED_BLOCKS = 2


def reason_against(dtype: DTypeLike, sides: tuple[int, int]) -> str | None:
    """Returns why the kernels cannot take operands and what to do, None if they can.

    Args:
        dtype: Dtype of the operands.
        sides: k and n. A side below 64 is padded, as for a vector.
    """
    if reason := hopper.reason_against(dtype):
        return reason
    for side in sides:
        if side > SIDE and side % SIDE:
            near = -(-side // SIDE) * SIDE
            return f"moves whole 128 bytes of a row, not {side} elements; set the size to {near}."
    return None


def forward(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "g p k n"],
    group_sizes: Int[Array, "g"],
    bias: Float[Array, "g p n"] | None,
    *,
    activation: Callable[..., Array] | None,
    save: bool,
    tiles: GpuTiles | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "m n"], tuple[Float[Array, "m n"], ...]]:
    """Returns the activation of p products, which are rounded, and the products if `save`.

    There is one launch per product; XLA computes the activation.
    """
    kw = {"transpose_rhs": False, "out_dtype": lhs.dtype, "tiles": tiles, "interpret": interpret}
    parts = tuple(
        _product((lhs,), rhs, group_sizes, None if bias is None else bias[:, i], first_part=i, **kw)
        for i in range(rhs.shape[1])
    )
    if activation is None:
        return parts[0], ()
    return activated(parts, activation, group_sizes), parts if save else ()


def input_gradient(
    grads: tuple[Float[Array, "m n"], ...],
    rhs: Float[Array, "g p k n"],
    group_sizes: Int[Array, "g"],
    *,
    tiles: GpuTiles | None = None,
    interpret: Any = False,
) -> Float[Array, "m k"]:
    """Returns the sum over p of `grads[p] @ rhs[:, p]^T`, by group, from one launch."""
    kw = {"first_part": 0, "transpose_rhs": True, "out_dtype": rhs.dtype}
    return _product(grads, rhs, group_sizes, None, tiles=tiles, interpret=interpret, **kw)


def weight_gradient(
    lhs: Float[Array, "m k"],
    grads: tuple[Float[Array, "m n"], ...],
    group_sizes: Int[Array, "g"],
    *,
    with_sums: bool,
    tiles: GpuTiles | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "g p k n"], Float[Array, "g p n"] | None]:
    """Returns the sums over each group's rows i of `lhs[i]^T grads[p][i]`, and of grads if wanted.

    The sums of grads are the products of a column of ones, for which grads are read once more.
    """
    run = functools.partial(_weights, grads=grads, sizes=group_sizes, tiles=tiles)
    result = run(lhs, dtype=lhs.dtype, interpret=interpret)
    if not with_sums:
        return result, None
    ones = jnp.ones_like(lhs, shape=(lhs.shape[0], 1))
    return result, run(ones, dtype=jnp.float32, interpret=interpret)[:, :, 0].astype(lhs.dtype)


def _product(
    lhs: tuple[Array, ...],
    rhs: Array,
    group_sizes: Array,
    bias: Array | None,
    *,
    transpose_rhs: bool,
    tiles: GpuTiles | None,
    interpret: Any,
    **options: Any,
) -> Array:
    from moelib.kernels.gmm.gpu_product import product

    axis = 2 if transpose_rhs else 3
    m, n = lhs[0].shape[0], rhs.shape[axis]
    lhs, rhs = tuple(_padded(rows, 8, 64) for rows in lhs), _padded(rhs, 64, 64)
    wide = rhs.shape[axis]
    bias = None if bias is None else jnp.pad(bias, ((0, 0), (0, wide - n)))
    depth = len(lhs) * lhs[0].shape[1]
    tiles = tiles or choose(m, depth, wide, rhs.shape[0], hopper.num_sms())
    run = functools.partial(product, transpose_rhs=transpose_rhs, tiles=tiles, **options)
    return _run(run, interpret, lhs, rhs, group_sizes, bias)[:m, :n]


def _weights(
    lhs: Array,
    *,
    grads: tuple[Array, ...],
    sizes: Array,
    dtype: DTypeLike,
    tiles: GpuTiles | None,
    interpret: Any,
) -> Array:
    from moelib.kernels.gmm.gpu_gradient import weight_gradient as run_kernel

    (m, k), n = lhs.shape, grads[0].shape[1]
    lhs, grads = _padded(lhs, 8, 64), tuple(_padded(grad, 8, 64) for grad in grads)
    sides = lhs.shape[1], grads[0].shape[1]
    tiles = tiles or choose_for_gradient(m, *sides, len(sizes), len(grads), hopper.num_sms())
    run = functools.partial(run_kernel, out_dtype=dtype, tiles=tiles)
    return _run(run, interpret, lhs, grads, sizes)[..., :k, :n]


def _padded(array: Array, rows: int, columns: int) -> Array:
    """Returns the array with zeros after its last two sides, up to a multiple each.

    That is a copy, but of few numbers: only odd numbers of rows, and sides below 64, are padded.
    """
    missing = [-side % to for side, to in zip(array.shape[-2:], (rows, columns), strict=True)]
    if missing == [0, 0]:
        return array
    return jnp.pad(array, [(0, 0)] * (array.ndim - 2) + [(0, more) for more in missing])


def _run(run: Callable[..., Array], interpret: Any, *operands: Any) -> Array:
    """Runs the kernel. Its result does not vary over mesh axes, unlike its operands."""
    if interpret is True:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        interpret = plgpu.InterpretGPUParams()
    num_blocks = _INTERPRETED_BLOCKS if interpret else hopper.num_sms()
    out = run(*operands, num_blocks=num_blocks, interpret=interpret)
    return align(out, operands)[0]
