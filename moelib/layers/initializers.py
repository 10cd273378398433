"""Initializers of parameters: functions that return `(key, spec) -> values`.

Keys are derived from each parameter's path, so values depend neither on the mesh nor on the order
of layers. Initializers with the same arguments are the same object, so that they can be compared.
"""

import functools
import math

import jax
import jax.numpy as jnp

from moelib.core.param import Initializer, ParameterSpec


@functools.cache
def normal(std: float = 0.02) -> Initializer:
    """Returns an initializer that draws from N(0, std^2)."""

    def init(key: jax.Array, spec: ParameterSpec) -> jax.Array:
        return (std * jax.random.normal(key, spec.shape, jnp.float32)).astype(spec.dtype)

    return init


@functools.cache
def truncated_normal(std: float = 0.02, bound: float = 3.0) -> Initializer:
    """Returns an initializer that draws from N(0, std^2), truncated at +-`bound` * std."""

    def init(key: jax.Array, spec: ParameterSpec) -> jax.Array:
        values = jax.random.truncated_normal(key, -bound, bound, spec.shape, jnp.float32)
        return (std * values).astype(spec.dtype)

    return init


@functools.cache
def fan_in_normal(scale: float = 1.0) -> Initializer:
    """Returns an initializer that draws from N(0, scale^2 / fan-in) (LeCun et al., 1998)."""

    def init(key: jax.Array, spec: ParameterSpec) -> jax.Array:
        fan_in, _ = spec.fans()
        return normal(scale / math.sqrt(fan_in))(key, spec)

    return init


@functools.cache
def fan_in_uniform() -> Initializer:
    """Returns an initializer that draws from U(-s, s) with s = 1 / sqrt(fan-in), as PyTorch."""

    def init(key: jax.Array, spec: ParameterSpec) -> jax.Array:
        fan_in, _ = spec.fans()
        bound = 1 / math.sqrt(fan_in)
        values = jax.random.uniform(key, spec.shape, jnp.float32, -bound, bound)
        return values.astype(spec.dtype)

    return init


@functools.cache
def constant(value: float = 0.0) -> Initializer:
    """Returns an initializer to a constant value."""

    def init(key: jax.Array, spec: ParameterSpec) -> jax.Array:
        del key
        return jnp.full(spec.shape, value, spec.dtype)

    return init


@functools.cache
def log_of_uniform(low: float, high: float) -> Initializer:
    """Returns an initializer to the logarithms of draws from U(low, high)."""

    def init(key: jax.Array, spec: ParameterSpec) -> jax.Array:
        values = jax.random.uniform(key, spec.shape, jnp.float32, low, high)
        return jnp.log(values).astype(spec.dtype)

    return init


@functools.cache
def inverse_softplus(low: float, high: float) -> Initializer:
    """Returns an initializer to values whose softplus is distributed log-uniformly over a range."""

    def init(key: jax.Array, spec: ParameterSpec) -> jax.Array:
        log = jax.random.uniform(key, spec.shape, jnp.float32, math.log(low), math.log(high))
        return jnp.log(jnp.expm1(jnp.exp(log))).astype(spec.dtype)

    return init
