"""Metrics that average rightly over devices, micro-batches and steps."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Scalars = dict[str, float]  # Metrics by name.


class WeightedScalar(NamedTuple):
    """A mean and the weight it was taken over, for example a loss and its number of tokens."""

    mean: jax.Array
    weight: jax.Array


def weighted(mean: Any, weight: Any) -> WeightedScalar:
    """Returns a WeightedScalar of float32 scalars."""
    return WeightedScalar(jnp.asarray(mean, jnp.float32), jnp.asarray(weight, jnp.float32))


def combine(a: WeightedScalar, b: WeightedScalar) -> WeightedScalar:
    """Returns the mean over both; 0 with weight 0 where both weights are 0."""
    weight = a.weight + b.weight
    total = a.mean * a.weight + b.mean * b.weight
    return WeightedScalar(jnp.where(weight > 0, total / jnp.maximum(weight, 1e-30), 0.0), weight)


def is_weighted(value: Any) -> bool:
    """Returns whether a value is a WeightedScalar (for `is_leaf`)."""
    return isinstance(value, WeightedScalar)
