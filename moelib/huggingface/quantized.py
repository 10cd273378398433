"""Quantized weights: MXFP4, in which GPT-OSS is published, and block-scaled FP8 of DeepSeek-V3.

Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 (E2M1) and 5.4.1 (E8M0);
DeepSeek-V3, arXiv:2412.19437, section 3.3.2 (one scale per block of 128 x 128 weights).
"""

from collections.abc import Collection

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from moelib.core.errors import UserError
from moelib.huggingface.tensors import Source, TensorMismatchError

_BLOCKS, _SCALES = "_blocks", "_scales"
_INVERSE = "_scale_inv"  # Suffix of the scales of a weight in DeepSeek-V3.
_BLOCK = 128
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES = np.concatenate([_MAGNITUDES, -_MAGNITUDES])  # Bit 3 is the sign.


class Dequantized:
    """A source of tensors that dequantizes, exactly, those stored with scales.

    `NAME_blocks` [..., n, G, 16] uint8 and `NAME_scales` [..., n, G] uint8 are read as `NAME`
    [..., 32 G, n] bfloat16. `NAME` [m, n] float8 and `NAME_scale_inv` [m / 128, n / 128], rounded
    up, of any floating dtype, are read as `NAME` [m, n] float32.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        names = set(source.keys())
        blocks = {name.removesuffix(_BLOCKS) for name in names if name.endswith(_BLOCKS)}
        self._packed = {name for name in blocks if name + _SCALES in names}
        self._scaled = {name for name in names if name + _INVERSE in names}

    def keys(self) -> Collection[str]:
        """Returns the names of all tensors."""
        parts = {name + suffix for name in self._packed for suffix in (_BLOCKS, _SCALES)}
        parts |= {name + _INVERSE for name in self._scaled}
        return (set(self.source.keys()) - parts) | self._packed

    def shape(self, key: str) -> tuple[int, ...]:
        """Returns the shape of a tensor."""
        if key not in self._packed:
            return self.source.shape(key)
        *lead, n, num_groups, size = self.source.shape(key + _BLOCKS)
        return (*lead, num_groups * size * 2, n)

    def read(self, key: str) -> np.ndarray:
        """Returns a tensor. Raises TensorMismatchError unless float8 alone has scales."""
        if key in self._packed:
            return dequantize(self.source.read(key + _BLOCKS), self.source.read(key + _SCALES))
        values, has_scales = self.source.read(key), key in self._scaled
        if has_scales != values.dtype.name.startswith("float8"):
            raise TensorMismatchError(
                f"{key} is of dtype {values.dtype} and {key}{_INVERSE} is "
                f"{'present' if has_scales else 'missing'}; float8, and no other dtype, has scales."
            )
        return scaled(values, self.source.read(key + _INVERSE), key) if has_scales else values


def dequantize(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns values [..., 32 G, n] bfloat16.

    Blocks are pairs of 4-bit values [..., n, G, 16] uint8, the low half first; scales are exponents
    [..., n, G] uint8 with a bias of 127.
    """
    *lead, n, num_groups, size = blocks.shape
    out = np.empty((*lead, num_groups * size * 2, n), ml_dtypes.bfloat16)
    for at in np.ndindex(*lead):  # Holds one expert at a time in float32.
        low, high = _VALUES[blocks[at] & 15], _VALUES[blocks[at] >> 4]
        values = np.stack([low, high], -1)  # [n, G, 16, 2]
        values = np.ldexp(values, scales[at].astype(np.int32)[..., None, None] - 127)
        out[at] = values.reshape(n, -1).T
    return out


def scaled(values: np.ndarray, scales: np.ndarray, name: str) -> np.ndarray:
    """Returns values [m, n] float32, each times the scale of its block of 128 x 128.

    Values and scales [m / 128, n / 128], sizes rounded up, are of any floating dtype.

    Raises:
        UserError: If the number of scales or their dtype does not match.
    """
    wanted = tuple(-(-size // _BLOCK) for size in values.shape)
    if scales.shape != wanted or not jnp.issubdtype(scales.dtype, jnp.floating):
        raise UserError(
            f"{name} {values.shape} has scales {scales.shape} of dtype {scales.dtype}; moelib "
            f"reads one floating scale per block of {_BLOCK} x {_BLOCK} weights, {wanted}."
        )
    out, scales = values.astype(np.float32), scales.astype(np.float32)
    for i, row in enumerate(scales):
        out[i * _BLOCK : (i + 1) * _BLOCK] *= np.repeat(row, _BLOCK)[: out.shape[1]]
    return out
