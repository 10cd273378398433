"""Spread of initial weights: a variance of one over the number of terms of each weight's sums."""

from collections.abc import Mapping
from typing import Any

import numpy as np

# Axes, counted from the last, that a product with the weight sums over.
_SUMMED = {
    "up": (-2,),
    "down": (-2,),
    "router/weight": (-2,),
    "lm_head/weight": (-2,),
    "q": (-3,),
    "kv": (-4,),
    "q_down": (-2,),
    "q_up": (-3,),
    "kv_down": (-2,),
    "kv_up": (-3,),
    "k_rope": (-2,),
    "self_attention/output": (-3, -2),
}


def check_initial_scales(values: Mapping[str, Any]) -> set[str]:
    """Checks the weights of these paths, and returns the names of those that are known."""
    found = set()
    for path, value in values.items():
        x = np.asarray(value, np.float64)
        for name, axes in _SUMMED.items():
            if f"/{path}".endswith(f"/{name}"):
                want = np.prod([x.shape[axis] for axis in axes]) ** -0.5
                rtol = 5 / np.sqrt(2 * x.size)  # Five standard errors.
                np.testing.assert_allclose(x.std(), want, rtol=rtol, err_msg=path)
                found.add(name)
    return found
