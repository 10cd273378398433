"""Dispatchers: tokens travel to their experts, and the outputs are combined per token.

All dispatchers give the same output and gradients where they drop nothing. They see the tokens of
one device, inside a shard_map if there are several:

    dense      every expert computes every token: the oracle, for tests
    sorted     rows sorted by expert, one grouped matmul; dropless
    ragged     sorted, and rows travel to the devices that hold their experts; dropless
    ring       sorted, and all tokens of a group of devices travel to each of them; dropless
    capacity   a fixed number of rows per expert; drops the rest

`dense` and `sorted` need the weights of all experts: experts that are sharded over mesh axes are
gathered for them, as other weights are. The others leave them sharded.

Shapes: B batch, S sequence, T = B S tokens, K experts per token, E experts, D model.
"""

import math
from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from moelib.core.config import Configurable
from moelib.core.tree import Nested
from moelib.layers.moe.rows import sort_assignments, sum_rows, take_rows, take_weights
from moelib.layers.remat import save_activation
from moelib.parallel.exchange import gather_sizes, group_size


@runtime_checkable
class Experts(Protocol):
    """The interface of the layer that holds the experts; see `FeedForwardExperts`."""

    # Parameters added to sums over the hidden dimension; devices that share it add them once.
    added_once: ClassVar[tuple[str, ...]]

    def grouped(
        self,
        params: Nested,
        rows: Float[Array, "R D"],
        group_sizes: Int[Array, "E"],
        weights: Float[Array, "R"],
    ) -> Float[Array, "R D"]:
        """Returns weight times output, without output biases, for rows sorted by expert."""
        ...

    def weighted_biases(
        self, params: Nested, ids: Int[Array, "T K"], weights: Float[Array, "T K"]
    ) -> Float[Array, "T D"] | None:
        """Returns each token's weighted sum of output biases, None without such biases."""
        ...

    def batched(self, params: Nested, rows: Float[Array, "E C D"]) -> Float[Array, "E C D"]:
        """Returns the experts' outputs for equally many rows per expert."""
        ...


class Assignments(NamedTuple):
    """The experts of this device's tokens."""

    # The K experts of each token; an id outside 0 to E - 1 stands for no expert.
    expert_ids: Int[Array, "B S K"]
    weights: Float[Array, "B S K"]  # Combine weights, float32.
    mask: Bool[Array, "B S"]  # False for padding, which goes to no expert.


class DispatchContext(NamedTuple):
    """The surroundings of a dispatcher."""

    num_experts: int  # E, on all devices.
    # Mesh axes over which experts are sharded; each device has its own tokens.
    expert_axes: tuple[str, ...] = ()
    sequence_axes: tuple[str, ...] = ()  # Mesh axes over which the sequence dimension is sharded.


class Dispatched(NamedTuple):
    """The result of a dispatcher."""

    y: Float[Array, "B S D"]  # Weighted sum of the experts' outputs per token; 0 for padding.
    num_dropped: Float[Array, ""]  # Number of this device's assignments that were dropped, float32.


class Local(NamedTuple):
    """The experts and the tokens of one device."""

    experts: Experts  # The layer of the experts.
    params: Nested  # Weights of the experts, of this device only for expert-parallel dispatchers.
    x: Float[Array, "T D"]  # Tokens.
    # Experts of the tokens; E for assignments of padding, and for ids outside 0 to E - 1.
    ids: Int[Array, "T K"]
    weights: Float[Array, "T K"]  # Combine weights, float32.
    batch: int  # B, the number of sequences.


class Dispatcher(Configurable):
    """Sends tokens to experts and combines the outputs."""

    # Whether it takes this device's experts only, and reaches those of other devices itself.
    expert_parallel: ClassVar[bool] = False

    def __call__(
        self,
        experts: Experts,
        params: Nested,
        x: Float[Array, "B S D"],
        assignments: Assignments,
        context: DispatchContext,
    ) -> Dispatched:
        """Returns the weighted sums of the experts' outputs."""
        ids, num_experts = assignments.expert_ids, context.num_experts
        valid = assignments.mask[..., None] & (ids >= 0) & (ids < num_experts)
        ids = jnp.where(valid, ids, num_experts).reshape(-1, ids.shape[-1])
        weights = assignments.weights.reshape(ids.shape)
        tokens = x.reshape(-1, x.shape[-1])
        local = Local(experts, params, tokens, ids, weights, x.shape[0])
        y, num_dropped = self._dispatch(local, context)
        return Dispatched(y.reshape(x.shape), num_dropped)

    @abstractmethod
    def _dispatch(
        self, local: Local, context: DispatchContext
    ) -> tuple[Float[Array, "T D"], Float[Array, ""]]:
        """Returns (weighted sums of the experts' outputs, number of dropped assignments)."""


class DenseDispatcher(Dispatcher):
    """The oracle: every expert computes every token, E / K times the work; for tests."""

    def _dispatch(self, local: Local, context: DispatchContext) -> tuple[Array, Array]:
        num_experts = context.num_experts
        assigned = local.ids[..., None] == jnp.arange(num_experts)[None, None]  # [T, K, E]
        # Padding may hold NaN, which a weight of 0 would not remove.
        x = jnp.where(jnp.any(assigned, (1, 2))[:, None], local.x, 0)
        rows = jnp.broadcast_to(x[None], (num_experts, *x.shape))
        outputs = local.experts.batched(local.params, rows)  # [E, T, D]
        dense = jnp.sum(jnp.where(assigned, local.weights[..., None], 0.0), 1)  # [T, E]
        y = jnp.einsum("etd,te->td", outputs.astype(jnp.float32), dense)
        return y.astype(x.dtype), jnp.zeros((), jnp.float32)


class SortedDispatcher(Dispatcher):
    """Dropless: rows sorted by expert, one grouped matmul for all experts, rows summed per token.

    Dispatch and combine are gathers in both directions: no scatter, no copy of tokens K times.
    """

    def _dispatch(self, local: Local, context: DispatchContext) -> tuple[Array, Array]:
        y = run_sorted(local, context.num_experts, local.ids.size)
        return y, jnp.zeros((), jnp.float32)


def run_sorted(local: Local, num_experts: int, num_rows: int) -> Float[Array, "T D"]:
    """Returns each token's weighted sum over the experts that `local` holds.

    These have the ids from 0 to `num_experts` - 1; at most `num_rows` assignments go to them.
    """
    ids = jnp.minimum(local.ids, num_experts)
    row_map, group_sizes = sort_assignments(ids, num_experts, num_rows)
    rows = save_activation(take_rows(local.x, row_map), "experts_input")
    weights = take_weights(local.weights, row_map)
    outputs = local.experts.grouped(local.params, rows, group_sizes, weights)
    y = sum_rows(outputs, row_map)
    biases = local.experts.weighted_biases(local.params, ids, local.weights)
    return y if biases is None else (y.astype(jnp.float32) + biases).astype(y.dtype)


def within_capacity(
    groups: Int[Array, "B S K"],
    num_groups: int,
    factor: float | None,
    sequence_axes: tuple[str, ...] = (),
) -> Bool[Array, "B S K"]:
    """Returns the assignments that are within the capacity of their sequence and group.

    The capacity is `factor` times the balanced load of the sequence's tokens that have an expert;
    None keeps all. The first assignments of a group are kept, in token order. Neither padding nor
    other sequences change the result, and it is the same on every mesh. The group of an assignment
    to no expert is `num_groups`. The mesh axes shard the sequence dimension.
    """
    flat = groups.reshape(groups.shape[0], -1)
    kept = flat < num_groups
    if factor is not None:
        num_tokens = jnp.sum(jnp.any(groups < num_groups, -1), 1, dtype=jnp.float32)
        if group_size(sequence_axes) > 1:
            num_tokens = lax.psum(num_tokens, sequence_axes)
        capacity = sequence_capacity(factor * groups.shape[-1] / num_groups, num_tokens)
        kept &= positions(flat, num_groups, sequence_axes)[0] < capacity[:, None]
    return kept.reshape(groups.shape)


def sequence_capacity(per_token: float, num_tokens: Float[Any, "B"]) -> Int[Array, "B"]:
    """Returns the capacity of sequences of so many tokens, rounded up, at least 1."""
    # Slightly less, so that no rounding error adds 1 to a whole number.
    return jnp.maximum(jnp.ceil(num_tokens * (per_token * (1 - 1e-6))), 1.0).astype(jnp.int32)


def positions(
    groups: Int[Array, "B N"], num_groups: int, axes: tuple[str, ...]
) -> tuple[Int[Array, "B N"], Int[Array, "B g"]]:
    """Returns (number of earlier members of each member's group in its row, sizes of the groups).

    A row continues over the devices along the mesh axes. Entries whose group is not among the
    `num_groups` are of no group; their position has no meaning.
    """
    member = groups[..., None] == jnp.arange(num_groups)[None, None]  # [B, N, g]
    rank = jnp.cumsum(member, 1, dtype=jnp.int32)  # Counted from 1.
    sizes = rank[:, -1]
    if group_size(axes) > 1:
        part_sizes = gather_sizes(sizes, axes)  # [parts, B, g]
        earlier = jnp.arange(part_sizes.shape[0]) < lax.axis_index(axes)
        rank = rank + jnp.sum(jnp.where(earlier[:, None, None], part_sizes, 0), 0)[:, None]
        sizes = jnp.sum(part_sizes, 0)
    return jnp.sum(jnp.where(member, rank - 1, 0), -1), sizes


def capacity_for(factor: float | None, balanced: float, most: int) -> int:
    """Returns `factor` times a balanced load of assignments, rounded up, from 1 to `most`.

    None as factor gives `most`.
    """
    return most if factor is None else min(most, max(1, math.ceil(factor * balanced)))
