"""Metrics of the routing, logged for every MoE layer."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from moelib.core.metrics import Metric, maximum, weighted
from moelib.layers.moe.balance import expert_counts
from moelib.layers.moe.router import Routing


def router_entropy(probs: Float[Array, "B S E"]) -> Float[Array, "B S"]:
    """Returns the entropy of the router's probabilities of each token, nats."""
    return -jnp.sum(probs * jnp.log(jnp.maximum(probs, 1e-30)), -1)


def routing_metrics(routing: Routing, num_dropped: Float[Array, ""]) -> dict[str, Metric]:
    """Returns the metrics of one layer, over its valid tokens.

    Of several micro-batches or batches, dead_experts and logit_rms are means, weighted by tokens.

    load_max_over_mean: Assignments to the busiest expert over the mean, 1 when even. Combines to
        the largest over micro-batches.
    dead_experts: Number of experts without an assignment.
    entropy: Mean entropy of the router's probabilities, nats; log E for uniform ones.
    logit_rms: Root mean square of the router's logits.
    drop_rate: Assignments that a dispatcher dropped, over all assignments.
    expert_counts: float32 [E], assignments to each expert, dropped ones included.
    """
    num_experts = routing.probs.shape[-1]
    tokens = jnp.sum(routing.mask, dtype=jnp.float32)
    counts = jnp.sum(expert_counts(routing.expert_ids, routing.mask, num_experts), 0)  # [E]
    mean, assigned = jnp.maximum(jnp.mean(counts), 1e-9), jnp.sum(counts)

    def token_mean(values: Float[Array, "B S"]) -> Float[Array, ""]:
        return jnp.sum(jnp.where(routing.mask, values, 0.0)) / jnp.maximum(tokens, 1.0)

    squares = jnp.mean(jnp.square(routing.logits), -1)
    return {
        "load_max_over_mean": maximum(jnp.max(counts) / mean),
        "dead_experts": weighted(jnp.sum(counts == 0, dtype=jnp.float32), tokens),
        "entropy": weighted(token_mean(router_entropy(routing.probs)), tokens),
        "drop_rate": weighted(num_dropped / jnp.maximum(assigned, 1.0), assigned),
        "logit_rms": weighted(jnp.sqrt(token_mean(squares)), tokens),
        "expert_counts": weighted(counts, jnp.broadcast_to(tokens, counts.shape)),
    }
