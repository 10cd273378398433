"""Mixture of experts in float64, one token and one expert at a time.

Shapes: T tokens, E experts, K experts per token, D model, F hidden.
"""

from typing import Any

import numpy as np


def sigmoid(x: Any) -> np.ndarray:
    """Returns 1 / (1 + exp(-x))."""
    return 1 / (1 + np.exp(-np.asarray(x, np.float64)))


def softmax(x: Any) -> np.ndarray:
    """Returns probabilities along the last dimension."""
    exp = np.exp(x - np.max(x, -1, keepdims=True), dtype=np.float64)
    return exp / exp.sum(-1, keepdims=True)


def swiglu(x: Any, up: Any, down: Any) -> np.ndarray:
    """Returns the feed-forward layer [..., D] of gate and up matrices [2, D, F] and down [F, D]."""
    gate = x @ up[0]
    return (gate * sigmoid(gate) * (x @ up[1])) @ down


def routed(experts: Any, x: Any, ids: Any, weights: Any) -> np.ndarray:
    """Returns sum_k weights[t, k] * expert ids[t, k] of x[t], [T, D]; other ids are no expert."""
    x, out = np.asarray(x, np.float64), np.zeros(np.shape(x))
    up, down = (np.asarray(experts[name], np.float64) for name in ("up", "down"))
    for t, k in np.ndindex(*np.shape(ids)):
        if 0 <= (e := ids[t, k]) < len(up):
            out[t] += np.float64(weights[t, k]) * swiglu(x[t], up[e], down[e])
    return out
