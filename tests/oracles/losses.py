"""Losses in float64.

Shapes: T tokens, V vocabulary, E experts, K experts per token, B batch, S sequence.
"""

from typing import Any

import numpy as np


def cross_entropy(hidden: Any, head: Any, labels: Any, z_loss: float = 0.0) -> Any:
    """Returns ((loss, (nll, lse)), gradients in hidden and head), with weight z_loss of lse^2.

    Args:
        hidden: Vectors of tokens [T, D].
        head: Matrix [D, V].
        labels: Labels [T]; a negative one excludes its token.
        z_loss: Weight of the square of each token's logsumexp.
    """
    counted = np.asarray(labels) >= 0
    hidden, head = np.where(counted[:, None], np.float64(hidden), 0), np.float64(head)
    logits = hidden @ head
    lse = logsumexp(logits)
    is_label = np.arange(head.shape[1]) == np.asarray(labels)[:, None]
    nll = lse - (logits * is_label).sum(1)
    of_logits = np.exp(logits - lse[:, None]) * (1 + 2 * z_loss * lse[:, None]) - is_label
    of_logits *= counted[:, None]
    loss = ((nll + z_loss * lse**2) * counted).sum()
    grads = of_logits @ head.T, hidden.T @ of_logits
    return (loss, (nll * counted, lse * counted)), grads


def logsumexp(logits: Any) -> np.ndarray:
    """Returns log sum exp along the last dimension."""
    return np.log(np.exp(np.asarray(logits, np.float64)).sum(-1))


def load_balance(probs: Any, ids: Any, counts: Any = 0) -> float:
    """Returns E sum_e f_e P_e of the Switch Transformer, eq. 4, with f_e a share of assignments.

    Args:
        probs: Probabilities [T, E].
        ids: Experts [T, K] of each token.
        counts: Assignments [E] of earlier tokens, which f counts too.
    """
    num_experts = probs.shape[-1]
    counts = counts + np.bincount(np.ravel(ids), minlength=num_experts)
    return num_experts * np.sum(counts / counts.sum() * np.asarray(probs, np.float64).mean(0))


def router_z(logits: Any) -> float:
    """Returns the mean square of the logsumexp of the router's logits [T, E]."""
    return np.mean(logsumexp(logits) ** 2)


def multi_token_labels(labels: Any, segment_ids: Any, depth: int) -> np.ndarray:
    """Returns the labels [B, S] that a depth predicts: those `depth` later in the document."""
    labels, segments = np.asarray(labels), np.asarray(segment_ids)
    found = np.full(labels.shape, -1)
    for b, i in np.ndindex(len(labels), labels.shape[1] - depth):
        if segments[b, i] == segments[b, i + depth] > 0:
            found[b, i] = labels[b, i + depth]
    return found
