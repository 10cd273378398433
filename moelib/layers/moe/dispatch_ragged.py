"""Dropless dispatch to experts on other devices: by a ragged all-to-all, or by gathering tokens.

Shapes: n devices that share the experts, T tokens of one of them, K experts per token, e = E / n
local experts, D model.
"""

import functools
import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from moelib.core.config import config_class
from moelib.core.config_types import PositiveFloat
from moelib.layers.moe.dispatch import (
    DispatchContext,
    Dispatcher,
    Local,
    positions,
    run_sorted,
)
from moelib.layers.moe.rounds import rows_per_round, run_in_rounds
from moelib.layers.moe.rows import RowMap, sort_assignments, sum_rows, take_rows
from moelib.layers.remat import save_routing
from moelib.parallel.exchange import exchange, gather_sizes, group_size

# Rows of a round's buffer are a multiple of this, a whole number of the kernels' tiles.
_ALIGNED = 16


class _ExpertParallel(Dispatcher):
    """Sends tokens to the devices that hold their experts, which receive them in rounds."""

    expert_parallel = True

    @config_class
    class Config(Dispatcher.Config):
        # Receive capacity of a round, as a multiple of the balanced load of K T assignments: a
        # higher load takes more rounds, a loop that drops nothing. Buffers have this size where the
        # largest possible load, min(n, E / K), is more than twice the balanced one; otherwise, and
        # with None, a single round receives all.
        round_factor: PositiveFloat | None = 1.25

    def _most_received(self, local: Local, context: DispatchContext) -> int:
        """Returns the most assignments that a device can receive."""
        n = group_size(context.expert_axes)
        num_tokens, top_k = local.ids.shape
        return n * num_tokens * min(top_k, context.num_experts // n)

    def _round_capacity(self, num_assignments: int, num_rows: int) -> int:
        """Returns the assignments that a device receives per round, of `num_rows` at most in all.

        The balanced load is `num_assignments`.
        """
        rows = rows_per_round(self.config.round_factor, num_assignments, num_rows)
        return min(num_rows, math.ceil(rows / _ALIGNED) * _ALIGNED)


class RaggedDispatcher(_ExpertParallel):
    """Dropless: rows travel to their experts' devices and back by a ragged all-to-all.

    A token travels once to a device, however many of its experts are there; its weights travel
    with it, and the weighted sum of those experts' outputs comes back as one row. Of K T rows that
    is n (1 - C(E - e, K) / C(E, K)) / K under uniform routing: a quarter for 128 experts, K = 8 and
    n = 2, all of them for n = E.
    """

    def _dispatch(self, local: Local, context: DispatchContext) -> tuple[Array, Array]:
        axes = context.expert_axes
        n = group_size(axes)
        num_local = context.num_experts // n
        num_rows = self._most_received(local, context)
        num_dropped = jnp.zeros((), jnp.float32)
        if n == 1:
            return run_sorted(local, num_local, num_rows), num_dropped
        capacity = self._round_capacity(local.ids.size, num_rows)
        run = functools.partial(self._round, context=context, num_rows=capacity)
        if capacity == num_rows:
            return run(local), num_dropped
        receivers = (local.ids // num_local).reshape(1, -1)  # n for no expert.
        position, loads = positions(receivers, n, axes)
        rounds = save_routing((position // capacity).reshape(local.ids.shape))
        num_rounds = save_routing(-(-jnp.max(loads) // capacity))
        return run_in_rounds(run, local, rounds, num_rounds, context.num_experts), num_dropped

    def _round(
        self, local: Local, *, context: DispatchContext, num_rows: int
    ) -> Float[Array, "T D"]:
        """Returns the weighted sums of outputs; each device receives `num_rows` rows at most."""
        axes = context.expert_axes
        n = group_size(axes)
        num_local = context.num_experts // n
        num_tokens, top_k = local.ids.shape
        device = local.ids // num_local  # [T, K]; n for an assignment to no expert.
        row_map, sent = sort_assignments(
            jnp.where(_first_of_each(device), device, n), n, num_tokens * min(top_k, n)
        )
        sizes = gather_sizes(sent, axes)
        num_received = min(n * num_tokens, num_rows)
        send = functools.partial(
            exchange, sizes=sizes, axes=axes, num_received=num_received, max_pair=num_tokens
        )
        metadata = save_routing(send(_metadata(local, device, row_map, num_local)))
        ids, weights = _received_assignments(metadata, sizes, axes, num_local)
        received = local._replace(x=send(take_rows(local.x, row_map)), ids=ids, weights=weights)
        y = run_sorted(received, num_local, num_rows)
        num_sent = row_map.assignments.shape[0]
        back = exchange(y, sizes.T, axes=axes, num_received=num_sent, max_pair=num_tokens)
        return sum_rows(back, row_map)


def _first_of_each(device: Int[Array, "T K"]) -> Bool[Array, "T K"]:
    """Returns the assignments that are their token's first to their device."""
    top_k = device.shape[1]
    same = device[:, :, None] == device[:, None, :]  # [T, K, K]
    earlier = jnp.arange(top_k)[:, None] > jnp.arange(top_k)[None]  # [K, K]
    return ~jnp.any(same & earlier[None], -1)


def _metadata(
    local: Local, device: Int[Array, "T K"], row_map: RowMap, num_local: int
) -> Float[Array, "R M"]:
    """Returns the routing metadata sent with each row: local expert ids and combine weights."""
    of_row = device.reshape(-1).at[row_map.assignments].get(mode="fill", fill_value=-1)  # [R]
    tokens = row_map.tokens
    here = device.at[tokens].get(mode="fill", fill_value=-2) == of_row[:, None]  # [R, K]
    ids = local.ids.at[tokens].get(mode="fill", fill_value=0) - of_row[:, None] * num_local
    ids = jnp.where(here, ids, num_local).astype(local.weights.dtype)
    return jnp.concatenate([ids, take_rows(local.weights, row_map)], -1)


def _received_assignments(
    metadata: Float[Array, "R M"], sizes: Int[Array, "n n"], axes: tuple[str, ...], num_local: int
) -> tuple[Int[Array, "R K"], Float[Array, "R K"]]:
    """Returns (local ids, weights) of the received rows; no experts for rows past them."""
    num_received = jnp.sum(sizes[:, lax.axis_index(axes)])
    ids, weights = jnp.split(metadata, 2, -1)
    valid = (jnp.arange(metadata.shape[0]) < num_received)[:, None]
    ids = jnp.where(valid, lax.stop_gradient(ids), num_local).astype(jnp.int32)
    return ids, jnp.where(ids < num_local, weights, 0.0)


class RingDispatcher(_ExpertParallel):
    """Dropless: every device receives all tokens, and computes its experts' outputs for them.

    Tokens are gathered before they are copied to rows, and outputs are summed on the way back: T
    rows each way from each of n devices, for any K. Cheaper than `RaggedDispatcher` where most
    tokens go to most devices: for K of n or more.
    """

    def _dispatch(self, local: Local, context: DispatchContext) -> tuple[Array, Array]:
        axes = context.expert_axes
        n = group_size(axes)
        num_local = context.num_experts // n
        num_rows = self._most_received(local, context)
        num_dropped = jnp.zeros((), jnp.float32)
        if n > 1:
            arrays = local.x, local.ids, local.weights
            x, ids, weights = (lax.all_gather(a, axes, tiled=True) for a in arrays)
            first = lax.axis_index(axes) * num_local
            is_local = (ids >= first) & (ids < first + num_local)
            ids = jnp.where(is_local, ids - first, num_local)
            local = local._replace(x=x, ids=ids, weights=weights)
        capacity = self._round_capacity(local.ids.size // n, num_rows)
        run = functools.partial(run_sorted, num_experts=num_local, num_rows=capacity)
        if capacity == num_rows:
            y = run(local)
        else:
            group = jnp.where(local.ids < num_local, 0, 1).reshape(1, -1)
            position, loads = positions(group, 1, ())
            rounds = save_routing((position // capacity).reshape(local.ids.shape))
            num_rounds = save_routing(-(-loads[0, 0] // capacity))
            y = run_in_rounds(run, local, rounds, num_rounds, num_local)
        return lax.psum_scatter(y, axes, tiled=True) if n > 1 else y, num_dropped
