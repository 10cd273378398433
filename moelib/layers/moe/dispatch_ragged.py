"""Dropless dispatch to experts on other devices: by a ragged all-to-all, or by gathering tokens.

Shapes: n devices that share the experts, T tokens of one of them, K experts a token, e = E / n
experts held by each, D width.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from moelib.core.config import config_class
from moelib.core.context import Nested
from moelib.layers.moe.dispatch import (
    Choices,
    Dispatched,
    Dispatcher,
    Experts,
    Place,
    check_factor,
    flat_choices,
    rows_within,
    run_sorted,
)
from moelib.layers.moe.rows import RowMap, keep_first, sort_choices, sum_rows, take_rows
from moelib.layers.remat import keep_routing
from moelib.parallel.exchange import exchange, gather_sizes, group_size


class _ExpertParallel(Dispatcher):
    """Sends tokens to the devices that hold their experts, within a buffer of a fixed size."""

    expert_parallel = True

    @config_class
    class Config(Dispatcher.Config):
        """Config of expert-parallel dispatchers."""

        # Rows of a device's experts over those of an even load, K T. None takes the most that can
        # come, min(n, E / K): nothing is ever dropped. With less, when more come, the choices of
        # the last tokens of the last devices are dropped, and counted: which ones is the same on
        # every run, but not on every mesh, for the room is each device's. (Capacity's is each
        # row's, and so the same on every mesh.)
        buffer_factor: float | None = None

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        check_factor(self, "buffer_factor")


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
        choices: Choices,
        place: Place,
    ) -> Dispatched:
        """Returns the weighted sums."""
        n = group_size(place.expert_axes)
        held = place.num_experts // n
        tokens, ids, weights = flat_choices(x, choices, place.num_experts)
        num_tokens, num_choices = ids.shape
        most = num_tokens * n * min(num_choices, held)
        num_rows = rows_within(self.config.buffer_factor, num_tokens * num_choices, most)
        if n == 1:
            y, num_dropped = run_sorted(experts, params, tokens, ids, weights, held, num_rows)
            return Dispatched(y.reshape(x.shape), num_dropped)
        device = ids // held  # [T, K]; n for padding.
        kept = device < n
        if num_rows < most:
            kept = _within_buffers(device, n, num_rows, place.expert_axes)
        num_dropped = jnp.sum((device < n) & ~kept, dtype=jnp.float32)
        device = jnp.where(kept, device, n)

        row_map, sent = sort_choices(
            jnp.where(_first_of_each(device), device, n), n, num_tokens * min(num_choices, n)
        )
        send = functools.partial(
            exchange,
            sizes=(sizes := gather_sizes(sent, place.expert_axes)),
            axes=place.expert_axes,
            num_received=min(n * num_tokens, num_rows),
            max_pair=num_tokens,
        )
        said = keep_routing(send(_choices_of_rows(ids, weights, device, row_map, held)))
        received_ids, received_weights = _received_choices(said, sizes, place, held)
        y, _ = run_sorted(
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
            axes=place.expert_axes,
            num_received=row_map.choices.shape[0],
            max_pair=num_tokens,
        )
        return Dispatched(sum_rows(back, row_map).reshape(x.shape), num_dropped)


def _first_of_each(device: Int[Array, "T K"]) -> Bool[Array, "T K"]:
    """Returns which choices are the first of their token to go to their device."""
    num_choices = device.shape[1]
    same = device[:, :, None] == device[:, None, :]  # [T, K, K]
    earlier = jnp.arange(num_choices)[:, None] > jnp.arange(num_choices)[None]  # [K, K]
    return ~jnp.any(same & earlier[None], -1)


def _within_buffers(
    device: Int[Array, "T K"], n: int, num_rows: int, axes: tuple[str, ...]
) -> Bool[Array, "T K"]:
    """Returns which choices still fit into the buffers of the devices they go to.

    Buffers fill up in the order of devices, and of tokens within one.
    """
    to = device[..., None] == jnp.arange(n)[None, None]  # [T, K, n]
    counts = gather_sizes(jnp.sum(to, (0, 1), dtype=jnp.int32), axes)  # [n, n]
    before = (jnp.cumsum(counts, 0) - counts)[lax.axis_index(axes)]
    kept = [keep_first(to[..., i], num_rows - before[i]) for i in range(n)]
    return jnp.any(jnp.stack(kept), 0)


def _choices_of_rows(
    ids: Int[Array, "T K"],
    weights: Float[Array, "T K"],
    device: Int[Array, "T K"],
    row_map: RowMap,
    held: int,
) -> Float[Array, "R M"]:
    """Returns what each row says to its device: (experts of that device, or none; weights)."""
    of_row = device.reshape(-1).at[row_map.choices].get(mode="fill", fill_value=-1)  # [R]
    tokens = row_map.tokens
    here = device.at[tokens].get(mode="fill", fill_value=-2) == of_row[:, None]  # [R, K]
    local = ids.at[tokens].get(mode="fill", fill_value=0) - of_row[:, None] * held
    local = jnp.where(here, local, held)
    return jnp.concatenate([local.astype(weights.dtype), take_rows(weights, row_map)], -1)


def _received_choices(
    said: Float[Array, "R M"], sizes: Int[Array, "n n"], place: Place, held: int
) -> tuple[Int[Array, "R K"], Float[Array, "R K"]]:
    """Returns (ids, weights) of the rows that came; of those past them, no experts."""
    came = jnp.sum(sizes[:, lax.axis_index(place.expert_axes)])
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
        choices: Choices,
        place: Place,
    ) -> Dispatched:
        """Returns the weighted sums."""
        axes = place.expert_axes
        n = group_size(axes)
        held = place.num_experts // n
        arrays = flat_choices(x, choices, place.num_experts)
        num_tokens, num_choices = arrays[1].shape
        first = 0
        if n > 1:
            arrays = tuple(lax.all_gather(a, axes, tiled=True) for a in arrays)
            first = lax.axis_index(axes) * held
        tokens, ids, weights = arrays
        ids = jnp.where((ids >= first) & (ids < first + held), ids - first, held)
        most = n * num_tokens * min(num_choices, held)
        num_rows = rows_within(self.config.buffer_factor, num_tokens * num_choices, most)
        y, num_dropped = run_sorted(experts, params, tokens, ids, weights, held, num_rows)
        if n > 1:
            y = lax.psum_scatter(y, axes, tiled=True)
        return Dispatched(y.reshape(x.shape), num_dropped)
