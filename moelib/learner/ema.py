"""An exponential moving average of the parameters, without bias from its first step on.

After t updates it is sum_i (1 - d) d^(t - i) p_i / (1 - d^t): weights that sum to 1 over the
parameters p_1 ... p_t after each update, without the initial values (Kingma and Ba,
arXiv:1412.6980, section 3, for moments). The state is this quotient itself, where `optax.ema` keeps
the sum, so that it can be evaluated as it is.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moelib.core.errors import UserError
from moelib.core.precision import cast_floats


class EmaState(NamedTuple):
    """State of an average of parameters."""

    count: jax.Array  # Number of updates so far, int32 scalar.
    params: Any  # The average, floats in float32; before the first update, the parameters.


class ParamEma(NamedTuple):
    """Functions of an average: `init(params)` and `update(params, state)`."""

    init: Callable[[Any], EmaState]
    update: Callable[[Any, EmaState], EmaState]


def param_ema(*, decay: float | None = None) -> ParamEma | None:
    """Returns an average with `decay` d, 0 <= d < 1, or None for none.

    Raises:
        UserError: If `decay` is out of range.
    """
    if decay is None:
        return None
    if not 0 <= decay < 1:
        raise UserError(f"param_ema: decay is {decay}; set it to 0 or more and below 1, or None.")

    def init(params: Any) -> EmaState:
        copy = jax.tree.map(jnp.copy, params)  # In new buffers: the parameters are donated.
        return EmaState(jnp.zeros((), jnp.int32), cast_floats(copy, jnp.float32))

    def update(params: Any, state: EmaState) -> EmaState:
        count = state.count + 1
        weight = _weight(decay, count)

        def average(old: jax.Array, new: jax.Array) -> jax.Array:
            return (1 - weight) * old + weight * new.astype(old.dtype)

        return EmaState(count, jax.tree.map(average, state.params, params))

    return ParamEma(init, update)


def _weight(decay: float, count: jax.Array) -> jax.Array:
    """Returns (1 - d) / (1 - d^t), exactly 1 at t = 1, float32; 1 - d^t would cancel near d = 1."""
    if decay == 0:
        return jnp.ones((), jnp.float32)
    rest = -jnp.expm1(count.astype(jnp.float32) * math.log(decay))  # 1 - d^t
    return jnp.where(count == 1, 1.0, (1 - decay) / rest)
