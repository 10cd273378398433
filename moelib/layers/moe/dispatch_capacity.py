"""Dispatch by capacity: a fixed number of rows for each expert, so that all sizes are static.

Shapes: B rows of the batch, S tokens of each, K experts a token, E experts, C capacity, D width.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moelib.core.config import config_class
from moelib.core.context import Nested
from moelib.layers.moe.dispatch import (
    Assignments,
    DispatchContext,
    Dispatched,
    Dispatcher,
    Experts,
    check_factor,
    first_of_row,
    flat_assignments,
    rows_within,
)
from moelib.layers.moe.rows import RowMap, combine_rows, sort_assignments, take_rows
from moelib.parallel.exchange import group_size


class CapacityDispatcher(Dispatcher):
    """Each row of the batch sends at most C = capacity_factor S K / E assignments to each expert.

    The first C assignments, in the order of tokens, are kept, the others dropped: the same ones on
    every mesh, since a row of the batch stands by itself. Rows travel by one all-to-all of fixed
    size each way. Source: GShard, arXiv:2006.16668, algorithm 1, with a row as the group.
    """

    expert_parallel = True

    @config_class
    class Config(Dispatcher.Config):
        capacity_factor: float = 1.25  # E / K and more drops nothing.

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        check_factor(self, "capacity_factor")

    def __call__(
        self,
        experts: Experts,
        params: Nested,
        x: Float[Array, "B S D"],
        assignments: Assignments,
        context: DispatchContext,
    ) -> Dispatched:
        """Returns the weighted sums."""
        batch, seq_len, top_k = assignments.expert_ids.shape
        n, num_experts = group_size(context.expert_axes), context.num_experts
        parts = group_size(context.sequence_axes)
        even = parts * seq_len * top_k / num_experts
        capacity = rows_within(self.config.capacity_factor, even, parts * seq_len)
        tokens, ids, weights = flat_assignments(x, assignments, num_experts)
        ids = ids.reshape(batch, seq_len, top_k)
        kept = first_of_row(ids, num_experts, capacity, context.sequence_axes)
        num_dropped = jnp.sum((ids < num_experts) & ~kept, dtype=jnp.float32)
        # A part of a row holds no more assignments of an expert than it has tokens.
        row_map = _slots(jnp.where(kept, ids, num_experts), num_experts, min(capacity, seq_len))
        held = (row_map.assignments < ids.size)[:, None]
        rows = jnp.where(held, take_rows(tokens, row_map), 0)  # Every row is computed.
        rows = rows.reshape(num_experts, -1, x.shape[-1])
        if n > 1:  # [E, B C, D] -> [E / n, n B C, D]
            rows = lax.all_to_all(rows, context.expert_axes, 0, 1, tiled=True)
        outputs = experts.batched(params, rows)
        if n > 1:
            outputs = lax.all_to_all(outputs, context.expert_axes, 1, 0, tiled=True)
        y = combine_rows(outputs.reshape(-1, x.shape[-1]), weights, row_map)
        return Dispatched(y.reshape(x.shape), num_dropped)


def _slots(ids: Int[Array, "B S K"], num_experts: int, capacity: int) -> RowMap:
    """Returns the map onto E * B * C rows, C for each expert and row of the batch.

    Args:
        ids: The expert of each assignment; E for one that is dropped.
        num_experts: E.
        capacity: C; no expert may have more of a row's assignments.
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
    first = (
        (jnp.arange(num_groups, dtype=jnp.int32) * capacity - starts)
        .at[keys]
        .get(mode="fill", fill_value=0)
    )
    rows = jnp.where(keys < num_groups, dense.rows + first, num_groups * capacity)
    return RowMap(assignments, rows.astype(jnp.int32))
