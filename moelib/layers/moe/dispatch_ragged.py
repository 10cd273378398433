"""Dropless dispatch to experts on other devices: by a ragged all-to-all, or by gathering tokens.

Shapes: n devices that share the experts, T tokens of one of them, K experts a token, e = E / n
experts held by each, D width.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

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
    run_sorted,
)
from moelib.layers.moe.rows import RowMap, sort_assignments, sum_rows, take_rows
from moelib.layers.remat import save_routing
from moelib.parallel.exchange import exchange, gather_sizes, group_size


class _ExpertParallel(Dispatcher):
    """Sends tokens to the devices that hold their experts, within a buffer of a fixed size."""

    expert_parallel = True

    @config_class
    class Config(Dispatcher.Config):
        """Config of expert-parallel dispatchers."""

        # Receive capacity per device, as a multiple of the balanced load of K T assignments. None
        # takes the largest possible load, min(n, E / K): nothing is ever dropped. Otherwise each
        # sequence may send buffer_factor S K / buffer_blocks assignments to each block of experts;
        # its last ones beyond are dropped, the same ones on every mesh, and counted.
        buffer_factor: float | None = None
        # Equal blocks of experts. Fewer drop less, for more experts share room. With more devices
        # than blocks each has room for a whole block: n / buffer_blocks times as much.
        buffer_blocks: int = 8

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        check_factor(self, "buffer_factor")
        if cfg.buffer_blocks < 1:
            raise ValueError(
                f"{type(self).__qualname__}.buffer_blocks is {cfg.buffer_blocks}; set 1 or more."
            )

    def _within_buffer(
        self, ids: Int[Array, "T K"], batch: int, context: DispatchContext
    ) -> "_Fitting":
        """Returns the assignments that there is room for.

        Args:
            ids: The experts of this device's tokens; E for none.
            batch: How many rows of the batch they are of.
            context: Where it runs.
        """
        num_experts, sequence_axes = context.num_experts, context.sequence_axes
        n = group_size(context.expert_axes)
        (num_tokens, top_k), held = ids.shape, num_experts // n
        most = n * num_tokens * min(top_k, held)
        if self.config.buffer_factor is None:
            return _Fitting(ids, most, jnp.zeros((), jnp.float32))
        num_blocks = self._num_blocks(num_experts)
        width, seq_len = num_experts // num_blocks, num_tokens // batch  # Of a block; of a part.
        per_token = min(top_k, width)
        length = group_size(sequence_axes) * seq_len
        even = length * top_k / num_blocks
        room = rows_within(self.config.buffer_factor, even, length * per_token)
        blocks = ids.reshape(batch, seq_len, top_k) // width
        kept = first_of_row(blocks, num_blocks, room, sequence_axes).reshape(ids.shape)
        num_dropped = jnp.sum((ids < num_experts) & ~kept, dtype=jnp.float32)
        # Parts of a row that lie within the group of devices share the row's room.
        parts = group_size([axis for axis in sequence_axes if axis in context.expert_axes])
        from_row = min(room, parts * seq_len * per_token)
        starts = range(0, num_experts, held)
        touched = max((i + held - 1) // width - i // width + 1 for i in starts)  # By a device.
        most = min(most, n // parts * batch * touched * from_row)
        return _Fitting(jnp.where(kept, ids, num_experts), most, num_dropped)

    def _num_blocks(self, num_experts: int) -> int:
        """Returns the blocks of experts. Raises ValueError if they do not divide the experts."""
        wanted = self.config.buffer_blocks
        if num_experts % wanted:
            nearest = min(
                (d for d in range(1, num_experts + 1) if num_experts % d == 0),
                key=lambda divisor: abs(divisor - wanted),
            )
            raise ValueError(
                f"{type(self).__qualname__}.buffer_blocks is {wanted}, which does not divide "
                f"{num_experts} experts; set {nearest}."
            )
        return wanted


class _Fitting(NamedTuple):
    """The assignments that there is room for.

    Attributes:
        ids: Their experts; E for none, and for those dropped.
        num_rows: The most assignments that come to a device.
        num_dropped: Assignments of this device's tokens that were dropped, float32.
    """

    ids: Int[Array, "T K"]
    num_rows: int
    num_dropped: Float[Array, ""]


class RaggedDispatcher(_ExpertParallel):
    """Dropless: rows travel to their experts' devices and back by a ragged all-to-all.

    A token travels once to a device, however many of its experts are there; its weights travel
    with it, and what those experts make of it comes back as one row, summed. Of K T rows that is
    n (1 - C(E - e, K) / C(E, K)) / K under uniform routing: a quarter for 128 experts, K = 8 and
    n = 2, all of them for n = E.
    """

    def __call__(
        self,
        experts: Experts,
        params: Nested,
        x: Float[Array, "B S D"],
        assignments: Assignments,
        context: DispatchContext,
    ) -> Dispatched:
        """Returns the weighted sums."""
        n = group_size(context.expert_axes)
        held = context.num_experts // n
        tokens, ids, weights = flat_assignments(x, assignments, context.num_experts)
        num_tokens, top_k = ids.shape
        ids, num_rows, num_dropped = self._within_buffer(ids, x.shape[0], context)
        if n == 1:
            y = run_sorted(experts, params, tokens, ids, weights, held, num_rows)
            return Dispatched(y.reshape(x.shape), num_dropped)
        device = ids // held  # [T, K]; n for an assignment that goes to none.
        row_map, sent = sort_assignments(
            jnp.where(_first_of_each(device), device, n), n, num_tokens * min(top_k, n)
        )
        send = functools.partial(
            exchange,
            sizes=(sizes := gather_sizes(sent, context.expert_axes)),
            axes=context.expert_axes,
            num_received=min(n * num_tokens, num_rows),
            max_pair=num_tokens,
        )
        said = save_routing(send(_assignments_of_rows(ids, weights, device, row_map, held)))
        received_ids, received_weights = _received_assignments(said, sizes, context, held)
        y = run_sorted(
            experts,
            params,
            send(take_rows(tokens, row_map)),
            received_ids,
            received_weights,
            held,
            num_rows,
        )
        back = exchange(
            y,
            sizes.T,
            axes=context.expert_axes,
            num_received=row_map.assignments.shape[0],
            max_pair=num_tokens,
        )
        return Dispatched(sum_rows(back, row_map).reshape(x.shape), num_dropped)


def _first_of_each(device: Int[Array, "T K"]) -> Bool[Array, "T K"]:
    """Returns which assignments are the first of their token to go to their device."""
    top_k = device.shape[1]
    same = device[:, :, None] == device[:, None, :]  # [T, K, K]
    earlier = jnp.arange(top_k)[:, None] > jnp.arange(top_k)[None]  # [K, K]
    return ~jnp.any(same & earlier[None], -1)


def _assignments_of_rows(
    ids: Int[Array, "T K"],
    weights: Float[Array, "T K"],
    device: Int[Array, "T K"],
    row_map: RowMap,
    held: int,
) -> Float[Array, "R M"]:
    """Returns what each row says to its device: (experts of that device, or none; weights)."""
    of_row = device.reshape(-1).at[row_map.assignments].get(mode="fill", fill_value=-1)  # [R]
    tokens = row_map.tokens
    here = device.at[tokens].get(mode="fill", fill_value=-2) == of_row[:, None]  # [R, K]
    local = ids.at[tokens].get(mode="fill", fill_value=0) - of_row[:, None] * held
    local = jnp.where(here, local, held)
    return jnp.concatenate([local.astype(weights.dtype), take_rows(weights, row_map)], -1)


def _received_assignments(
    said: Float[Array, "R M"], sizes: Int[Array, "n n"], context: DispatchContext, held: int
) -> tuple[Int[Array, "R K"], Float[Array, "R K"]]:
    """Returns (ids, weights) of the rows that came; of those past them, no experts."""
    came = jnp.sum(sizes[:, lax.axis_index(context.expert_axes)])
    ids, weights = jnp.split(said, 2, -1)
    valid = (jnp.arange(said.shape[0]) < came)[:, None]
    ids = jnp.where(valid, lax.stop_gradient(ids), held).astype(jnp.int32)
    return ids, jnp.where(ids < held, weights, 0.0)


class RingDispatcher(_ExpertParallel):
    """Dropless: every device gets the tokens of all, and computes what its experts make of them.

    Tokens are gathered before they are copied to rows, and what comes back is summed on the way: T
    rows each way from each of n devices, whatever K. Cheaper than `RaggedDispatcher` where most
    tokens go to most devices: for K of n or more.
    """

    def __call__(
        self,
        experts: Experts,
        params: Nested,
        x: Float[Array, "B S D"],
        assignments: Assignments,
        context: DispatchContext,
    ) -> Dispatched:
        """Returns the weighted sums."""
        axes = context.expert_axes
        n = group_size(axes)
        held = context.num_experts // n
        tokens, ids, weights = flat_assignments(x, assignments, context.num_experts)
        ids, num_rows, num_dropped = self._within_buffer(ids, x.shape[0], context)
        if n > 1:
            arrays = tokens, ids, weights
            tokens, ids, weights = (lax.all_gather(a, axes, tiled=True) for a in arrays)
            first = lax.axis_index(axes) * held
            ids = jnp.where((ids >= first) & (ids < first + held), ids - first, held)
        y = run_sorted(experts, params, tokens, ids, weights, held, num_rows)
        if n > 1:
            y = lax.psum_scatter(y, axes, tiled=True)
        return Dispatched(y.reshape(x.shape), num_dropped)
