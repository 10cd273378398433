"""Hopper GPUs (H100, H200): sizes of the chip that kernels are made for, and what they refuse."""

import re

import jax.numpy as jnp
from jax.typing import DTypeLike

from moelib.kernels.backend import current_device

SMEM_BYTES = 232_448  # Shared memory of one block of threads on sm_90.
SIDE = 64  # Rows that one warpgroup multiplies, and rows or columns of a step: 128 bytes of bf16.
ROW_BYTES = 128  # Width of shared memory that the swizzle permutes, and of a store's box.
_NUM_SMS = 132  # An H100 or H200 has so many; used if the device compiled for is unknown.
_DTYPES = ("bfloat16", "float16")
_HOPPER = re.compile(r"\bG?H(100|200|800|20)\b")


def is_hopper(device_kind: str) -> bool:
    """Returns whether a device's kind, such as "NVIDIA H100 80GB HBM3", is one of sm_90."""
    return _HOPPER.search(device_kind) is not None


def num_sms() -> int:
    """Returns the number of streaming multiprocessors of the GPU that is compiled for."""
    device = current_device()
    return device.num_cores or _NUM_SMS if device.platform == "gpu" else _NUM_SMS


def reason_against(dtype: DTypeLike) -> str | None:
    """Returns why no Hopper kernel can take a dtype here and what to do, or None if one can."""
    device = current_device()
    if device.platform == "gpu" and not is_hopper(device.kind):
        return f"needs a Hopper GPU (sm_90), not {device.kind}."
    if str(jnp.dtype(dtype)) not in _DTYPES:
        return f"takes {' and '.join(_DTYPES)}, not {jnp.dtype(dtype)}; cast to one of them."
    return None
