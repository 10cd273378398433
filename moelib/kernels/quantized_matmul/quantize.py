"""Quantized arrays: 8-bit values, and a power of two for each block.

Values of a block are x / scale in the scheme's dtype, rounded to nearest, ties to even. The scale
is the smallest power of two for which the largest magnitude of the block fits, but at least 2^-100:
a block of zeros gives exact zeros, and magnitudes below 2^-110 become zero. The scale is computed
from the values themselves, so none overflows. A NaN or an infinity makes its whole block NaN.

Since scales are powers of two, an entry of 8 bits times its scale is exact in bfloat16 and float32.

Shapes: m x n matrices in blocks of [rows, columns], m/b = ceil(m / block).
"""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

BLOCK = 128  # Side of a block.
ROWS, COLUMNS, TILES = (1, BLOCK), (BLOCK, 1), (BLOCK, BLOCK)

_MIN_EXPONENT = -100  # Of a scale. A product of two such scales and values underflows to zero.


class Format(NamedTuple):
    """The numbers of a scheme."""

    dtype: Any  # Of values.
    in_blocks: bool  # Whether each block has a scale; otherwise all of an array has one.
    scale_dtype: Any
    gradient_dtype: Any = None  # Of values of gradients of results, if another one.


class Quantization(enum.Enum):
    """The scheme by which matmuls with a weight quantize their operands."""

    NONE = "none"  # Not quantized, in a layer inside of one that is.
    # float8_e4m3fn with a float32 scale per block. DeepSeek-V3, arXiv:2412.19437, section 3.3.
    FP8_BLOCK = "fp8-block"
    FP8_BLOCK_E8M0 = "fp8-block-e8m0"  # The same with scales of 8 bits, as Blackwell reads them.
    # float8_e4m3fn with one scale per array; gradients of results in float8_e5m2, since one scale
    # for all of them needs its range. arXiv:2209.05433, section 3.
    FP8_TENSOR = "fp8-tensor"
    INT8_BLOCK = "int8-block"  # int8 with a float32 scale per block.

    @property
    def format(self) -> Format:
        """The numbers of the scheme; there are none for NONE."""
        return _FORMATS[self]


_E4M3, _F32 = jnp.float8_e4m3fn, jnp.float32
_FORMATS = {
    Quantization.FP8_BLOCK: Format(_E4M3, True, _F32),
    Quantization.FP8_BLOCK_E8M0: Format(_E4M3, True, jnp.float8_e8m0fnu),
    Quantization.FP8_TENSOR: Format(_E4M3, False, _F32, jnp.float8_e5m2),
    Quantization.INT8_BLOCK: Format(jnp.int8, True, _F32),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """A quantized array."""

    values: Any  # [..., m, n], 8 bits.
    # [..., m/b, n/b] powers of two. A dimension of size 1 or of the values' size is not in blocks.
    scales: Any
    scheme: Quantization = dataclasses.field(metadata={"static": True})

    def expanded_scales(self, axes: Sequence[int]) -> Array:
        """Returns the scales with these dimensions of the values' size, or of size 1."""
        scales = self.scales
        for axis in axes:
            size = self.values.shape[axis]
            if scales.shape[axis] not in (1, size):
                scales = jnp.repeat(scales, BLOCK, axis)
                scales = lax.slice_in_dim(scales, 0, size, axis=axis)
        return scales

    def gathered(self, split: jax.P) -> "Quantized":
        """Returns the array with whole scales and values of this sharding, sent in 8 bits."""
        # As integers: XLA moves casts of floats across gathers, or has no gather of 8-bit floats.
        values = lax.bitcast_convert_type(self.values, jnp.uint8)
        values = lax.with_sharding_constraint(values, split)
        values = lax.bitcast_convert_type(values, self.values.dtype)
        scales = lax.with_sharding_constraint(self.scales, jax.P())
        return dataclasses.replace(self, values=values, scales=scales)

    def dequantized(self, dtype: Any) -> Array:
        """Returns values times scales, which is exact in bfloat16 and float32."""
        sides = zip(self.scales.shape[-2:], self.values.shape[-2:], strict=True)
        rows, columns = ({1: size, size: 1}.get(num, BLOCK) for num, size in sides)
        tiles = _in_blocks(self.values.astype(dtype), (rows, columns))
        return _joined(tiles * self.scales.astype(dtype)[..., None, :, None], self.values.shape)


def quantize(
    x: Float[Array, "... m n"],
    block: tuple[int, int],
    scheme: Quantization,
    *,
    is_gradient: bool = False,
) -> Quantized:
    """Returns an array in blocks of [rows, columns], incomplete ones at the ends included.

    Schemes without blocks have one scale for all of `x`. `is_gradient` is whether it is the
    gradient of a matmul's result, for which a scheme may have another dtype.
    """
    fmt = scheme.format
    dtype = fmt.gradient_dtype if is_gradient and fmt.gradient_dtype else fmt.dtype
    limit = _limit(dtype)
    m, n = x.shape[-2:]
    tiles = _in_blocks(x, block if fmt.in_blocks else (m, n))
    # XLA's maximum may drop a NaN, but no infinity.
    sizes = jnp.where(jnp.isfinite(tiles), jnp.abs(tiles), jnp.inf)
    axes = (-3, -1) if fmt.in_blocks else tuple(range(tiles.ndim))
    amax = jnp.max(sizes, axes, keepdims=True, initial=0.0).astype(jnp.float32)
    scales = _power_of_two(amax, limit)
    y = jnp.clip(tiles.astype(jnp.float32) * (1.0 / scales), -limit, limit)
    y = _rounded(y, dtype)
    scales = jnp.squeeze(scales.astype(fmt.scale_dtype), (-3, -1))
    return Quantized(_joined(y.astype(dtype), x.shape), scales, scheme)


def _limit(dtype: Any) -> float:
    """Returns the largest magnitude of a dtype."""
    info = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
    return float(info(dtype).max)


def _rounded(x: Array, dtype: Any) -> Array:
    """Returns float32 numbers that a cast to `dtype` does not change.

    XLA for GPUs drops a cast to 8-bit floats that another cast follows, as excess precision.
    """
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.round(x)
    info = jnp.finfo(dtype)
    step = float(info.smallest_subnormal)
    small = jnp.round(x / step) * step
    exact = lax.reduce_precision(x, jnp.finfo(x.dtype).nexp, info.nmant)
    return jnp.where(jnp.abs(x) < float(info.smallest_normal), small, exact)


def _in_blocks(x: Array, block: tuple[int, int]) -> Array:
    """Returns [..., m/b, rows, n/b, columns], filled up with zeros."""
    *lead, m, n = x.shape
    rows, columns = block
    pad = [(0, 0)] * len(lead) + [(0, -m % max(rows, 1)), (0, -n % max(columns, 1))]
    shape = (*lead, -(-m // max(rows, 1)), rows, -(-n // max(columns, 1)), columns)
    return jnp.pad(x, pad).reshape(shape)


def _joined(tiles: Array, shape: tuple[int, ...]) -> Array:
    """Returns the matrices of these shapes from their blocks."""
    *lead, num_m, rows, num_n, columns = tiles.shape
    x = tiles.reshape(*lead, num_m * rows, num_n * columns)
    return x[..., : shape[-2], : shape[-1]]


def _power_of_two(amax: Array, limit: float) -> Array:
    """Returns the smallest 2^e with amax / 2^e <= limit; NaN if amax is infinite."""
    # Bits of float32 are compared, since a division would have to be exact.
    bits = lax.bitcast_convert_type(amax, jnp.uint32)
    of_limit = int(np.float32(limit).view(np.uint32))
    fraction = (1 << 23) - 1
    exponent = (bits >> 23).astype(jnp.int32) - (of_limit >> 23) + 127
    exponent += ((bits & fraction) > (of_limit & fraction)).astype(jnp.int32)
    exponent = jnp.maximum(exponent, _MIN_EXPONENT + 127)
    scale = lax.bitcast_convert_type(exponent << 23, jnp.float32)
    return jnp.where((bits >> 23) < 255, scale, jnp.nan)
