"""The delta rule in NumPy, float64: a loop over sequences, heads and tokens."""

from typing import Any

import numpy as np


def delta_rule(
    q: Any,
    k: Any,
    v: Any,
    log_decay: Any,
    beta: Any,
    segment_ids: Any,
    state: Any = None,
    *,
    corrected: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (outputs [B, S, H, V], states [B, H, K, V]) of q [B, S, H, K], ..., beta [B, S, H].

    Padding (segment 0) is left out, and its outputs are 0. `log_decay` is [B, S, H, 1 or K].
    """
    q, k, v, log_decay, beta = (np.asarray(x, np.float64) for x in (q, k, v, log_decay, beta))
    out = np.zeros(v.shape)
    states = np.zeros((len(q), *q.shape[2:], v.shape[-1]))
    for b, h in np.ndindex(len(q), q.shape[2]):
        matrix = states[b, h] if state is None else np.array(state[b, h], np.float64)
        document = None
        for t in np.flatnonzero(segment_ids[b]):
            if document not in (None, segment_ids[b, t]):
                matrix = np.zeros(matrix.shape)
            document = segment_ids[b, t]
            matrix = np.exp(log_decay[b, t, h])[:, None] * matrix
            error = v[b, t, h] - (k[b, t, h] @ matrix if corrected else 0)
            matrix = matrix + beta[b, t, h] * np.outer(k[b, t, h], error)
            out[b, t, h] = q[b, t, h] @ matrix
        states[b, h] = matrix
    return out, states
