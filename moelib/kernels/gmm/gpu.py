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


def gmm(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "g p ..."],
    part: int,
    group_sizes: Int[Array, "g"],
    bias: Float[Array, "g n"] | None,
    *,
    transpose_rhs: bool,
    out_dtype: DTypeLike,
    tiles: GpuTiles | None = None,
    interpret: Any = False,
) -> Float[Array, "m n"]:
    """Returns `lhs[i] @ rhs[group of row i, part]` plus its bias, zeros for rows of no group.

    With `transpose_rhs` it multiplies by the transposes of the matrices [g, p, n, k].
    """
    from moelib.kernels.gmm.gpu_product import product

    axis = 1 if transpose_rhs else 2
    rhs = rhs[:, part]
    m, n = lhs.shape[0], rhs.shape[axis]
    lhs, rhs = _padded(lhs, 8, 64), _padded(rhs, 64, 64)
    wide = rhs.shape[axis]
    bias = None if bias is None else jnp.pad(bias, ((0, 0), (0, wide - n)))
    tiles = tiles or choose(m, lhs.shape[1], wide, rhs.shape[0], hopper.num_sms())
    run = functools.partial(product, transpose_rhs=transpose_rhs, out_dtype=out_dtype, tiles=tiles)
    return _run(run, interpret, lhs, rhs, group_sizes, bias)[:m, :n]


def gmm_weight_gradient(
    lhs: Float[Array, "m k"],
    grad: Float[Array, "m n"],
    group_sizes: Int[Array, "g"],
    *,
    with_sums: bool,
    tiles: GpuTiles | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "g k n"], Float[Array, "g n"] | None]:
    """Returns the sums over each group's rows i of `lhs[i]^T grad[i]`, and of grad if wanted.

    The sums of grad are the products of a column of ones, for which grad is read once more.
    """
    run = functools.partial(_weights, grad=grad, sizes=group_sizes, tiles=tiles)
    result = run(lhs, dtype=lhs.dtype, interpret=interpret)
    if not with_sums:
        return result, None
    ones = jnp.ones_like(lhs, shape=(lhs.shape[0], 1))
    return result, run(ones, dtype=jnp.float32, interpret=interpret)[:, 0].astype(lhs.dtype)


def _weights(
    lhs: Array,
    *,
    grad: Array,
    sizes: Array,
    dtype: DTypeLike,
    tiles: GpuTiles | None,
    interpret: Any,
) -> Array:
    from moelib.kernels.gmm.gpu_gradient import weight_gradient

    (m, k), n = lhs.shape, grad.shape[1]
    lhs, grad = _padded(lhs, 8, 64), _padded(grad, 8, 64)
    sides = lhs.shape[1], grad.shape[1]
    tiles = tiles or choose_for_gradient(m, *sides, len(sizes), hopper.num_sms())
    run = functools.partial(weight_gradient, out_dtype=dtype, tiles=tiles)
    return _run(run, interpret, lhs, grad, sizes)[:, :k, :n]


def _padded(array: Array, rows: int, columns: int) -> Array:
    """Returns the array with zeros after its last two sides, up to a multiple each.

    That is a copy, but of few numbers: only odd numbers of rows, and sides below 64, are padded.
    """
    missing = [-side % to for side, to in zip(array.shape[-2:], (rows, columns), strict=True)]
    if missing == [0, 0]:
        return array
    return jnp.pad(array, [(0, 0)] * (array.ndim - 2) + [(0, more) for more in missing])


def _run(run: Callable[..., Array], interpret: Any, *operands: Array | None) -> Array:
    """Runs the kernel. Its result does not vary over mesh axes, unlike its operands."""
    if interpret is True:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        interpret = plgpu.InterpretGPUParams()
    num_blocks = _INTERPRETED_BLOCKS if interpret else hopper.num_sms()
    out = run(*operands, num_blocks=num_blocks, interpret=interpret)
    return align(out, operands[0])[0]
