"""Grouped matmul for Hopper GPUs (H100, H200): Mosaic-GPU kernels on their tensor cores.

A group's matrix meets only the windows of 64 rows that hold its rows, and nothing is sorted, padded
or copied. The tensor cores' instruction (`wgmma`) takes 16-bit floats and sums in float32, and the
copy engine (TMA) moves whole 128 bytes of a row, so k and n are multiples of 64. What does not fit
is an error if this backend was asked for by name. If it was not, the "cpu" form takes it, and that
is reported once. What is Mosaic's is imported where it is used, for that takes a second.

Shapes: m rows, k in, n out, g groups held, s groups counted.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moelib.core.varying import align, zeros_like_varying
from moelib.kernels.gmm.gpu_tiles import (
    SIDE,
    GpuTiles,
    choose,
    choose_for_gradient,
    current_gpu,
    is_hopper,
)

DTYPES = ("bfloat16", "float16")
_INTERPRETED_BLOCKS = 2
_SMS = 132  # Of an H100 or H200, if what is compiled for is not known.

_logger = logging.getLogger(__name__)


def gmm(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "g ..."],
    group_sizes: Int[Array, "s"],
    bias: Float[Array, "g n"] | None = None,
    group_offset: Int[Array, ""] | None = None,
    *,
    transpose_rhs: bool,
    out_dtype: DTypeLike,
    tiles: GpuTiles | None = None,
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
        out_dtype: Dtype of the result: bfloat16, float16 or float32.
        tiles: Chosen by `gpu_tiles.choose` by default.
        interpret: What `plgpu.kernel` is given; by default the kernel is compiled for a GPU and
            interpreted elsewhere.

    Raises:
        ValueError: If the kernel cannot take the dtypes or the sides, or the GPU is no Hopper.
    """
    from moelib.kernels.gmm.gpu_product import product

    axis = 1 if transpose_rhs else 2
    m, n, g = lhs.shape[0], rhs.shape[axis], rhs.shape[0]
    if 0 in (m, n, g):
        return zeros_like_varying((m, n), out_dtype, lhs)
    _check("gmm", unfit(lhs.dtype, (lhs.shape[1], n), out_dtype))
    lhs, rhs = _padded(lhs, 8, 64), _padded(rhs, 64, 64)
    wide = rhs.shape[axis]
    bias = None if bias is None else jnp.pad(bias, ((0, 0), (0, wide - n)))
    blocks = _num_blocks()
    run = functools.partial(
        product,
        transpose_rhs=transpose_rhs,
        out_dtype=out_dtype,
        tiles=tiles or choose(m, lhs.shape[1], wide, g, blocks),
    )
    return _on_platform(run, interpret, blocks, lhs, rhs, group_sizes, bias, group_offset)[:m, :n]


def gmm_weight_gradient(
    lhs: Float[Array, "m k"],
    grad: Float[Array, "m n"],
    group_sizes: Int[Array, "s"],
    group_offset: Int[Array, ""] | None = None,
    *,
    out_dtype: DTypeLike,
    num_groups: int | None = None,
    bias_dtype: DTypeLike | None = None,
    tiles: GpuTiles | None = None,
    interpret: Any = None,
) -> Float[Array, "g k n"] | tuple[Float[Array, "g k n"], Float[Array, "g n"]]:
    """Returns the sum of `lhs[i]^T grad[i]` over the rows i of each group held.

    Args:
        lhs: The rows, sorted by group.
        grad: As many rows.
        group_sizes: Number of rows of each group.
        group_offset: The first group held; 0 by default.
        out_dtype: Dtype of the result: bfloat16, float16 or float32.
        num_groups: Number of groups held; all by default.
        bias_dtype: If given, the sums of grad over the rows of each group are returned too. They
            are the products of a column of ones, for which grad is read once more.
        tiles: Chosen by `gpu_tiles.choose_for_gradient` by default.
        interpret: As for `gmm`.

    Raises:
        ValueError: As for `gmm`.
    """
    g = len(group_sizes) if num_groups is None else num_groups
    run = functools.partial(
        _weights, grad=grad, sizes=group_sizes, offset=group_offset, num_groups=g, tiles=tiles
    )
    made = run(lhs, dtype=out_dtype, interpret=interpret)
    if bias_dtype is None:
        return made
    ones = jnp.ones_like(lhs, shape=(lhs.shape[0], 1))
    return made, run(ones, dtype=jnp.float32, interpret=interpret)[:, 0].astype(bias_dtype)


def _weights(
    lhs: Array,
    *,
    grad: Array,
    sizes: Array,
    offset: Array | None,
    num_groups: int,
    dtype: DTypeLike,
    tiles: GpuTiles | None,
    interpret: Any,
) -> Array:
    from moelib.kernels.gmm.gpu_gradient import weight_gradient

    (m, k), n, g = lhs.shape, grad.shape[1], num_groups
    if 0 in (m, k, n, g):
        return zeros_like_varying((g, k, n), dtype, lhs)
    _check("gmm_weight_gradient", unfit(lhs.dtype, (k, n), dtype))
    lhs, grad = _padded(lhs, 8, 64), _padded(grad, 8, 64)
    blocks = _num_blocks()
    run = functools.partial(
        weight_gradient,
        num_groups=g,
        out_dtype=dtype,
        tiles=tiles or choose_for_gradient(m, lhs.shape[1], grad.shape[1], g, blocks),
    )
    made = _on_platform(run, interpret, blocks, lhs, grad, sizes, offset)
    return made[:, :k, :n]


def default_on_cuda(
    kernel: str, dtype: DTypeLike, sides: tuple[int, int], out_dtype: DTypeLike
) -> dict[str, str]:
    """Returns {"cuda": "gpu"} if this backend is to be the default there, else {}.

    It is if the program is known to be compiled for a Hopper GPU and the kernels take the operands.
    If it is for a GPU, and the kind of GPU or the operands are in the way, that is reported once.

    Args:
        kernel: Its name, for the report.
        dtype: Of the operands.
        sides: k and n.
        out_dtype: Dtype of the result.
    """
    found = current_gpu()
    if found is None:
        return {}
    if not is_hopper(found[0]):
        _report(f"{kernel} runs as XLA's loops over blocks of rows: no kernel is for {found[0]}.")
    elif reason := unfit(dtype, sides, out_dtype):
        _report(f"{kernel} runs as XLA's loops over blocks of rows, for the GPU's kernel {reason}")
    else:
        return {"cuda": "gpu"}
    return {}


def unfit(dtype: DTypeLike, sides: tuple[int, int], out_dtype: DTypeLike) -> str | None:
    """Returns why the kernels cannot take the operands, and what to do instead; None if they can.

    Args:
        dtype: Of the operands.
        sides: k and n. One of 64 or less is padded, as for a vector.
        out_dtype: Dtype of the result.
    """
    if str(jnp.dtype(dtype)) not in DTYPES:
        return f"multiplies {' and '.join(DTYPES)}, not {jnp.dtype(dtype)}; cast to one of them."
    if str(jnp.dtype(out_dtype)) not in (*DTYPES, "float32"):
        return f"returns {', '.join(DTYPES)} or float32, not {jnp.dtype(out_dtype)}; ask for one."
    for side in sides:
        if side > SIDE and side % SIDE:
            near = -(-side // SIDE) * SIDE
            return f"moves whole 128 bytes of a row, not {side} elements; pad them to {near}."
    return None


@functools.lru_cache(maxsize=256)
def _report(message: str) -> None:
    _logger.warning("%s", message)


def _check(kernel: str, reason: str | None) -> None:
    if reason is not None:
        raise ValueError(f"{kernel}: backend 'gpu' {reason}")
    found = current_gpu()
    if found is not None and not is_hopper(found[0]):
        raise ValueError(
            f"{kernel}: backend 'gpu' needs a Hopper GPU (sm_90), not {found[0]}; leave it unset."
        )


def _padded(array: Array, rows: int, columns: int) -> Array:
    """Returns the array with zeros after its last two sides, up to a multiple each.

    That is a copy, but of few numbers: sides over 64 that are padded are none but odd numbers of
    rows.
    """
    missing = [-side % to for side, to in zip(array.shape[-2:], (rows, columns), strict=True)]
    if missing == [0, 0]:
        return array
    return jnp.pad(array, [(0, 0)] * (array.ndim - 2) + [(0, more) for more in missing])


def _num_blocks() -> int:
    found = current_gpu()
    return _SMS if found is None else found[1]


def _on_platform(run: Callable[..., Array], interpret: Any, blocks: int, *operands: Any) -> Array:
    """Runs the kernel, compiled for a GPU and, unless `interpret` says, interpreted elsewhere."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def made(*operands: Any, num_blocks: int, interpret: Any) -> Array:
        out = run(*operands, num_blocks=num_blocks, interpret=interpret)
        return align(out, operands[0])[0]  # A kernel's result does not vary over mesh axes.

    interpreted = functools.partial(
        made, num_blocks=_INTERPRETED_BLOCKS, interpret=interpret or plgpu.InterpretGPUParams()
    )
    compiled = functools.partial(made, num_blocks=blocks, interpret=False)
    if interpret is not None:
        return (interpreted if interpret else compiled)(*operands)
    return lax.platform_dependent(*operands, cuda=compiled, default=interpreted)
