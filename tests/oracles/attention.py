"""Attention in float64, one query at a time.

Shapes: B batch, S sequence, H heads, G key/value heads, Dk and Dv dimensions of keys and values.
"""

from typing import Any

import numpy as np


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float,
    segment_ids: Any = None,
    causal: bool = True,
    window: int | None = None,
    logit_cap: float | None = None,
    sinks: Any = None,
) -> np.ndarray:
    """Returns outputs [B, S, H, Dv] of queries [B, S, H, Dk], keys [B, S, G, Dk] and values."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for b, i, h in np.ndindex(*q.shape[:3]):
        seen = np.arange(k.shape[1])
        if causal:
            seen = seen[(seen <= i) & (seen > i - (window or i + 1))]
        if segment_ids is not None:
            ids = np.asarray(segment_ids)[b]
            seen = seen[ids[seen] == ids[i]]
        group = h // (q.shape[2] // k.shape[2])
        scores = k[b, seen, group] @ q[b, i, h] * scale
        if logit_cap is not None:
            scores = logit_cap * np.tanh(scores / logit_cap)
        sink = -np.inf if sinks is None else float(sinks[h])
        most = max(scores.max(), sink)
        weights = np.exp(scores - most)
        out[b, i, h] = weights @ v[b, seen, group] / (weights.sum() + np.exp(sink - most))
    return out
