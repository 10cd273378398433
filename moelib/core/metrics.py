"""Metrics that combine correctly over micro-batches, devices and steps."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Scalars = dict[str, float]  # Metrics by name.


class WeightedScalar(NamedTuple):
    """A mean and its weight, for example a loss and its number of tokens."""

    mean: jax.Array
    weight: jax.Array


class MaxScalar(NamedTuple):
    """The largest of some values, for example the load of the busiest expert."""

    value: jax.Array


Metric = WeightedScalar | MaxScalar


def weighted(mean: Any, weight: Any) -> WeightedScalar:
    """Returns a WeightedScalar of float32 scalars."""
    return WeightedScalar(jnp.asarray(mean, jnp.float32), jnp.asarray(weight, jnp.float32))


def maximum(value: Any) -> MaxScalar:
    """Returns a MaxScalar of a float32 scalar."""
    return MaxScalar(jnp.asarray(value, jnp.float32))


def combine(a: Any, b: Any) -> Any:
    """Returns the metric over both, two WeightedScalars or two MaxScalars.

    A mean is 0 with weight 0 where both weights are 0; a mean of weight 0, which may be NaN, counts
    as 0.
    """
    if isinstance(a, MaxScalar):
        return MaxScalar(jnp.maximum(a.value, b.value))
    weight = a.weight + b.weight
    mean = lambda x: jnp.where(x.weight == 0, 0.0, x.mean)  # A NaN weight stays NaN.
    total = mean(a) * a.weight + mean(b) * b.weight
    return WeightedScalar(jnp.where(weight > 0, total / jnp.maximum(weight, 1e-30), 0.0), weight)


def empty(metric: Any) -> Any:
    """Returns a metric of the same type and shape that changes nothing when combined."""
    if isinstance(metric, MaxScalar):
        return MaxScalar(jnp.full(metric.value.shape, -jnp.inf, jnp.float32))
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), metric)


def reading(metric: Metric) -> jax.Array:
    """Returns the mean or the largest value."""
    return metric.value if isinstance(metric, MaxScalar) else metric.mean


def is_metric(value: Any) -> bool:
    """Returns whether a value is a WeightedScalar or a MaxScalar (for `is_leaf`)."""
    return isinstance(value, WeightedScalar | MaxScalar)
