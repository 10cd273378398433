"""Rounds: a dispatch whose buffers hold little more than a balanced load, as often as required.

The largest possible load of a device is min(n, E / K) times the balanced one for n devices, K of E
experts per token. Buffers of that size cost memory, and time too, for gathers, sums and casts
visit all of their rows. With rounds, both follow the load of the most loaded device of the group.

The first round is differentiated like any computation. The further ones, which balanced routing
does not need, are a loop of as many iterations as the routing requires; their backward pass
recomputes them and saves nothing.

Shapes: T tokens, K experts per token.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moelib.core.varying import zeros_like_varying
from moelib.layers.moe.dispatch import Local
from moelib.layers.quantization import join_gradients, split_gradients

# Name scope of the loop, by which reports of compiled programs recognize it.
FURTHER_ROUNDS = "further_rounds"

# Buffers for at most so many times the balanced load receive it in one round: a smaller buffer
# would save less than the loop costs in compile time.
_SINGLE_ROUND_LOAD = 2.0


def rows_per_round(factor: float | None, balanced: float, most: float) -> float:
    """Returns the assignments that a device receives per round.

    Args:
        factor: Capacity of a round, as a multiple of the balanced load; None for a single round.
        balanced: The balanced load.
        most: The largest possible load.
    """
    if factor is None or most <= _SINGLE_ROUND_LOAD * balanced:
        return most
    return min(most, factor * balanced)


def run_in_rounds(
    run: Callable[[Local], Float[Array, "T D"]],
    local: Local,
    rounds: Int[Array, "T K"],
    num_rounds: Int[Array, ""],
    no_expert: int,
) -> Float[Array, "T D"]:
    """Returns the sum of `run` over the rounds, each with the assignments of that round only.

    Further rounds are summed in float32, and cast once: rounding does not grow with their number.

    Args:
        run: Differentiable in the parameters, tokens and weights of what it is given.
        local: The tokens, with all their assignments.
        rounds: The round of each assignment, counted from 0.
        num_rounds: Number of rounds, equal on all devices with which `run` communicates.
        no_expert: The id that stands for no expert.
    """

    def one(values: Any, others: Any, i: Any) -> Array:
        (params, x, weights), (quantized, ids, rounds) = values, others
        params = join_gradients(params, quantized)
        ids = jnp.where(rounds == i, ids, no_expert)
        return run(Local(local.experts, params, x, ids, weights, local.batch))

    def add(total: Any, step: Callable[[Array], Any], num_rounds: Array) -> Any:
        """Adds the further rounds to a total, in float32."""
        remain = lambda state: state[0] < num_rounds

        def one_more(state: tuple[Array, Any]) -> tuple[Array, Any]:
            i, total = state
            return i + 1, jax.tree.map(lambda t, x: t + x.astype(t.dtype), total, step(i))

        # A loop of one iteration, or of none: only further rounds cost casts.
        def all_of_them(state: tuple[Array, Any]) -> tuple[Array, Any]:
            i, total = state
            wide = jax.tree.map(_wide, total)
            i, wide = lax.while_loop(remain, one_more, (i, wide))
            return i, jax.tree.map(lambda t, x: x.astype(t.dtype), total, wide)

        with jax.named_scope(FURTHER_ROUNDS):
            start = jnp.ones((), jnp.int32), total
            return lax.while_loop(remain, all_of_them, start)[1]

    # The values pass through, so that their gradients of the first round reach the backward loop.
    @jax.custom_vjp
    def further(values: Any, others: Any, num_rounds: Array) -> tuple[Any, Array]:
        x = values[1]
        zeros = zeros_like_varying(x.shape, x.dtype, x)
        return values, add(zeros, lambda i: one(values, others, i), num_rounds)

    def forward(*args: Any) -> tuple[Any, Any]:
        return further(*args), args

    def backward(residuals: Any, grads: tuple[Any, Array]) -> tuple[Any, None, None]:
        (values, others, num_rounds), (total, grad) = residuals, grads

        def step(i: Array) -> Any:
            return jax.vjp(lambda values: one(values, others, i), values)[1](grad)[0]

        return add(total, step, num_rounds), None, None

    further.defvjp(forward, backward)
    params, quantized = split_gradients(local.params)
    others = quantized, local.ids, rounds
    values, rest = further((params, local.x, local.weights), others, num_rounds)
    return one(values, others, 0) + rest


def _wide(x: Array) -> Array:
    return x.astype(jnp.float32) if jnp.finfo(x.dtype).bits < 32 else x
