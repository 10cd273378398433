"""Weights in MXFP4, in which GPT-OSS is published: 4-bit numbers with a scale for each 32.

Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 (E2M1) and 5.4.1 (E8M0).
"""

from collections.abc import Collection

import ml_dtypes
import numpy as np

from moelib.models.huggingface.tensors import Source

_BLOCKS, _SCALES = "_blocks", "_scales"
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES = np.concatenate([_MAGNITUDES, -_MAGNITUDES])  # Bit 3 is the sign.


class Dequantized:
    """Tensors of which those that are stored in MXFP4 read as bfloat16, which is exact.

    `NAME_blocks` [..., n, G, 16] uint8 and `NAME_scales` [..., n, G] uint8 read as `NAME`
    [..., 32 G, n].
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        names = set(source.keys())
        blocks = {name.removesuffix(_BLOCKS) for name in names if name.endswith(_BLOCKS)}
        self._packed = {name for name in blocks if name + _SCALES in names}

    def keys(self) -> Collection[str]:
        """Returns the names of all tensors."""
        parts = {name + suffix for name in self._packed for suffix in (_BLOCKS, _SCALES)}
        return (set(self.source.keys()) - parts) | self._packed

    def shape(self, key: str) -> tuple[int, ...]:
        """Returns the shape of a tensor."""
        if key not in self._packed:
            return self.source.shape(key)
        *lead, n, num_groups, size = self.source.shape(key + _BLOCKS)
        return (*lead, num_groups * size * 2, n)

    def read(self, key: str) -> np.ndarray:
        """Returns a tensor."""
        if key not in self._packed:
            return self.source.read(key)
        return dequantize(self.source.read(key + _BLOCKS), self.source.read(key + _SCALES))


def dequantize(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns values [..., 32 G, n] bfloat16.

    Args:
        blocks: [..., n, G, 16] uint8, two values each, the low half first.
        scales: [..., n, G] uint8, powers of two, 127 for 1.
    """
    values = np.stack([_VALUES[blocks & 15], _VALUES[blocks >> 4]], -1)  # [..., n, G, 16, 2]
    values = np.ldexp(values, scales.astype(np.int32)[..., None, None] - 127)
    values = values.reshape(*blocks.shape[:-2], -1).astype(ml_dtypes.bfloat16)
    return np.swapaxes(values, -1, -2)
