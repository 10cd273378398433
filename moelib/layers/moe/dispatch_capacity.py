"""Dispatch by capacity: a fixed number of rows per expert, so that all sizes are static.

Shapes: B batch, S sequence, K experts per token, E experts, C capacity, D model.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from moelib.core.config import config_class
from moelib.core.config_types import PositiveFloat
from moelib.layers.moe.dispatch import (
    DispatchContext,
    Dispatcher,
    Local,
    capacity_for,
    within_capacity,
)
from moelib.layers.moe.rows import RowMap, combine_rows, sort_assignments, take_rows
from moelib.parallel.exchange import group_size


class CapacityDispatcher(Dispatcher):
    """Sends at most capacity_factor S K / E assignments per sequence to each expert.

    S counts the sequence's tokens without padding. The first assignments in token order are kept,
    the others dropped: the same ones on every mesh, since sequences are independent. Rows travel by
    one all-to-all of fixed size each way, that of sequences without padding.
    Source: GShard, arXiv:2006.16668, algorithm 1, with a sequence as the group.
    """

    expert_parallel = True

    @config_class
    class Config(Dispatcher.Config):
        # Assignments per sequence and expert, as a multiple of the balanced load S K / E; E / K
        # never drops.
        capacity_factor: PositiveFloat = 1.25

    def _dispatch(self, local: Local, context: DispatchContext) -> tuple[Array, Array]:
        n, num_experts = group_size(context.expert_axes), context.num_experts
        ids = local.ids.reshape(local.batch, -1, local.ids.shape[-1])
        _, seq_len, top_k = ids.shape
        parts = group_size(context.sequence_axes)
        balanced = parts * seq_len * top_k / num_experts
        factor = self.config.capacity_factor
        capacity = capacity_for(factor, balanced, parts * seq_len)  # Without padding.
        kept = within_capacity(ids, num_experts, factor, context.sequence_axes)
        num_dropped = jnp.sum((ids < num_experts) & ~kept, dtype=jnp.float32)
        # A part of a sequence has at most one assignment per token to an expert.
        row_map = _slots(jnp.where(kept, ids, num_experts), num_experts, min(capacity, seq_len))
        held = (row_map.assignments < ids.size)[:, None]
        rows = jnp.where(held, take_rows(local.x, row_map), 0)  # Every row is computed.
        rows = rows.reshape(num_experts, -1, local.x.shape[-1])
        if n > 1:  # [E, B C, D] -> [E / n, n B C, D]
            rows = lax.all_to_all(rows, context.expert_axes, 0, 1, tiled=True)
        outputs = local.experts.batched(local.params, rows)
        if n > 1:
            outputs = lax.all_to_all(outputs, context.expert_axes, 1, 0, tiled=True)
        outputs = outputs.reshape(-1, local.x.shape[-1])
        return combine_rows(outputs, local.weights, row_map), num_dropped


def _slots(ids: Int[Array, "B S K"], num_experts: int, capacity: int) -> RowMap:
    """Returns the map to E * B * C rows, C per expert and sequence; ids are E where dropped.

    No sequence may have more than C assignments to an expert.
    """
    batch, _, top_k = ids.shape
    num_groups = num_experts * batch
    keys = ids * batch + jnp.arange(batch)[:, None, None]
    keys = jnp.where(ids < num_experts, keys, num_groups).reshape(-1, top_k)
    dense, sizes = sort_assignments(keys, num_groups, keys.size)
    starts = jnp.cumsum(sizes) - sizes
    slot = jnp.arange(capacity)
    source = jnp.where(slot[None] < sizes[:, None], starts[:, None] + slot[None], keys.size)
    assignments = dense.assignments.at[source.reshape(-1)].get(mode="fill", fill_value=keys.size)
    shift = jnp.arange(num_groups, dtype=jnp.int32) * capacity - starts
    rows = dense.rows + shift.at[keys].get(mode="fill", fill_value=0)
    rows = jnp.where(keys < num_groups, rows, num_groups * capacity)
    return RowMap(assignments, rows.astype(jnp.int32))
