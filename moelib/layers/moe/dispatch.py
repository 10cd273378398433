"""Dispatchers: how tokens reach their experts and come back as one sum.

Every dispatcher gives the same output and gradients where it drops nothing. They see the tokens
of one device, inside of a shard_map if there are more:

    dense      every expert computes every token: the oracle, for tests
    sorted     rows sorted by expert, one grouped matmul; dropless
    ragged     sorted, and rows travel to the devices that hold their experts; dropless
    ring       sorted, and all tokens of a group of devices travel to each of them; dropless
    capacity   a fixed number of rows an expert; drops the rest

`dense` and `sorted` need every expert's weights: experts that are split over mesh axes are gathered
for them, as other weights are. For the others they stay where they are.

Shapes: B batch, S sequence, T = B S tokens, K experts a token, E experts, D width.
"""

import math
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from moelib.core.config import Configurable
from moelib.core.context import Nested
from moelib.layers.moe.rows import combine_rows, sort_assignments, take_rows
from moelib.layers.remat import save_activation
from moelib.parallel.exchange import gather_sizes, group_size


@runtime_checkable
class Experts(Protocol):
    """What a dispatcher asks of the layer that holds the experts; see `FeedForwardExperts`."""

    added_once: ClassVar[tuple[str, ...]]  # Parameters that one of the devices adds that sum parts.

    def grouped(
        self, params: Nested, rows: Float[Array, "R D"], group_sizes: Int[Array, "E"]
    ) -> Float[Array, "R D"]:
        """Returns what each expert makes of its rows, which stand sorted by expert."""
        ...

    def batched(self, params: Nested, rows: Float[Array, "E C D"]) -> Float[Array, "E C D"]:
        """Returns what each expert makes of its rows, as many for each."""
        ...


class Assignments(NamedTuple):
    """Where this device's tokens go.

    Attributes:
        expert_ids: The K experts of each token; a number that is no expert's sends it to none.
        weights: What each expert's output is multiplied by, float32.
        mask: False for padding, which goes to no expert.
    """

    expert_ids: Int[Array, "B S K"]
    weights: Float[Array, "B S K"]
    mask: Bool[Array, "B S"]


class DispatchContext(NamedTuple):
    """Where a dispatcher runs.

    Attributes:
        num_experts: E, on all devices.
        expert_axes: Mesh axes over which experts are split; each device has its own tokens.
        sequence_axes: Mesh axes over which rows of the batch are split along the sequence.
    """

    num_experts: int
    expert_axes: tuple[str, ...] = ()
    sequence_axes: tuple[str, ...] = ()


class Dispatched(NamedTuple):
    """What a dispatcher returns.

    Attributes:
        y: For each token, the weighted sum of its experts' outputs; 0 for padding.
        num_dropped: How many assignments of this device's tokens were left out, float32.
    """

    y: Float[Array, "B S D"]
    num_dropped: Float[Array, ""]


class Dispatcher(Configurable):
    """Sends rows to experts and combines what comes back."""

    # Whether it takes its device's experts alone, and reaches the others by itself.
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
        raise NotImplementedError(f"{type(self).__qualname__} must define __call__.")


class DenseDispatcher(Dispatcher):
    """The oracle: every expert computes every token. E / K times the work; for tests."""

    def __call__(
        self,
        experts: Experts,
        params: Nested,
        x: Float[Array, "B S D"],
        assignments: Assignments,
        context: DispatchContext,
    ) -> Dispatched:
        """Returns the weighted sums."""
        tokens = jnp.where(assignments.mask[..., None], x, 0).reshape(-1, x.shape[-1])
        tokens = jnp.broadcast_to(tokens[None], (context.num_experts, *tokens.shape))
        outputs = experts.batched(params, tokens)  # [E, T, D]
        chosen = (
            assignments.expert_ids[..., None] == jnp.arange(context.num_experts)[None, None, None]
        )
        chosen = chosen & assignments.mask[..., None, None]  # [B, S, K, E]
        dense = jnp.sum(jnp.where(chosen, assignments.weights[..., None], 0.0), 2)
        dense = dense.reshape(-1, context.num_experts)  # [T, E]
        y = jnp.einsum("etd,te->td", outputs.astype(jnp.float32), dense).astype(x.dtype)
        return Dispatched(y.reshape(x.shape), jnp.zeros((), jnp.float32))


class SortedDispatcher(Dispatcher):
    """Dropless: rows sorted by expert, one grouped matmul for all experts, rows put back.

    Dispatch and combine are gathers in both directions: no scatter, no copy of tokens K times.
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
        tokens, ids, weights = flat_assignments(x, assignments, context.num_experts)
        y = run_sorted(experts, params, tokens, ids, weights, context.num_experts, ids.size)
        return Dispatched(y.reshape(x.shape), jnp.zeros((), jnp.float32))


def flat_assignments(
    x: Array, assignments: Assignments, num_experts: int
) -> tuple[Array, Array, Array]:
    """Returns (tokens [T, D], ids [T, K], weights [T, K]); E where an assignment goes to no expert.

    None are the assignments of padding, and those that name no expert from 0 to E - 1.
    """
    ids = assignments.expert_ids
    top_k = ids.shape[-1]
    goes = assignments.mask[..., None] & (ids >= 0) & (ids < num_experts)
    ids = jnp.where(goes, ids, num_experts)
    weights = assignments.weights.reshape(-1, top_k)
    return x.reshape(-1, x.shape[-1]), ids.reshape(-1, top_k), weights


def run_sorted(
    experts: Experts,
    params: Nested,
    x: Float[Array, "T D"],
    ids: Int[Array, "T K"],
    weights: Float[Array, "T K"],
    num_experts: int,
    num_rows: int,
) -> Float[Array, "T D"]:
    """Returns each token's weighted sum over the experts held here.

    Args:
        experts: The experts.
        params: Weights of those held here.
        x: Tokens.
        ids: Experts held here, from 0; `num_experts` or more for an assignment that goes to none.
        weights: Of the assignments, float32.
        num_experts: How many are held here.
        num_rows: The most assignments that go to one of them.
    """
    row_map, group_sizes = sort_assignments(jnp.minimum(ids, num_experts), num_experts, num_rows)
    rows = save_activation(take_rows(x, row_map), "experts_input")
    outputs = experts.grouped(params, rows, group_sizes)
    return combine_rows(outputs, weights, row_map)


def first_of_row(
    groups: Int[Array, "B S K"], num_groups: int, room: int, sequence_axes: tuple[str, ...]
) -> Bool[Array, "B S K"]:
    """Returns which assignments are among the first `room` that their row sends to their group.

    Rows of the batch stand by themselves, so that it is the same on every mesh.

    Args:
        groups: Of each assignment; `num_groups` for none.
        num_groups: How many there are.
        room: The most assignments of a row and a group.
        sequence_axes: Mesh axes over which rows are split.
    """
    batch = groups.shape[0]
    flat = groups.reshape(batch, -1, 1)
    chosen = (flat == jnp.arange(num_groups)[None, None]).astype(jnp.int32)  # [B, SK, g]
    rank = jnp.cumsum(chosen, 1)  # From 1.
    if group_size(sequence_axes) > 1:
        of_parts = gather_sizes(rank[:, -1], sequence_axes)  # [parts, B, g]
        earlier = jnp.arange(of_parts.shape[0]) < lax.axis_index(sequence_axes)
        rank = rank + jnp.sum(jnp.where(earlier[:, None, None], of_parts, 0), 0)[:, None]
    return jnp.any((chosen > 0) & (rank <= room), -1).reshape(groups.shape)


def rows_within(factor: float | None, even: float, most: int) -> int:
    """Returns the capacity in assignments: `factor` times an even load, at most `most`."""
    return most if factor is None else min(most, max(1, math.ceil(factor * even)))


def check_factor(owner: Any, field: str) -> None:
    """Raises ValueError unless the field of the owner's config is above 0 and finite, or None."""
    value = getattr(owner.config, field)
    if value is not None and not 0 < value < math.inf:
        raise ValueError(
            f"{type(owner).__qualname__}.{field} is {value}; set it above 0, to a finite number."
        )
