"""Rotary position embedding in float64, one pair at a time.

Shapes: Dk dimension of a head, whose entries i and i + Dk/2 are pair i.
"""

from typing import Any

import numpy as np


def rotated(x: np.ndarray, positions: Any, theta: float = 1e4) -> np.ndarray:
    """Returns x [..., Dk] with pair i rotated by position * theta^(-2i / Dk)."""
    half = x.shape[-1] // 2
    angles = np.asarray(positions)[..., None] * theta ** (-np.arange(half) / half)
    pairs = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([pairs.real, pairs.imag], -1)


def yarn(dim: int, theta: float, factor: float, ends: tuple[float, float]) -> np.ndarray:
    """Returns the frequencies [Dk/2] of YaRN, eq. 23, whose ramp has its ends at these pairs."""
    slowed = np.interp(np.arange(dim // 2), ends, (0, 1))
    return theta ** (-np.arange(dim // 2) * 2 / dim) * (1 - slowed + slowed / factor)


def llama3(
    dim: int,
    theta: float,
    *,
    factor: float,
    original_context: int,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
) -> np.ndarray:
    """Returns the frequencies [Dk/2] of Llama 3.1, by wavelength in tokens as in its code."""
    found = []
    for i in range(dim // 2):
        frequency = theta ** (-2 * i / dim)
        wavelength = 2 * np.pi / frequency
        if wavelength < original_context / high_freq_factor:
            found.append(frequency)
        elif wavelength > original_context / low_freq_factor:
            found.append(frequency / factor)
        else:
            turns = original_context / wavelength
            kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
            found.append((1 - kept) * frequency / factor + kept * frequency)
    return np.array(found)
