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
from jaxtyping import Array, Bool, Float, Int

from moelib.core.config import Configurable
from moelib.core.context import Nested
from moelib.layers.moe.rows import combine_rows, keep_first, sort_choices, take_rows
from moelib.layers.remat import keep_point


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


class Choices(NamedTuple):
    """Where this device's tokens go.

    Attributes:
        expert_ids: The K experts of each token; a number that is no expert's sends it to none.
        weights: What each expert's output is multiplied by, float32.
        mask: False for padding, which goes to no expert.
    """

    expert_ids: Int[Array, "B S K"]
    weights: Float[Array, "B S K"]
    mask: Bool[Array, "B S"]


class Place(NamedTuple):
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
        num_dropped: How many choices of this device's tokens were left out, float32.
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
        choices: Choices,
        place: Place,
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
        choices: Choices,
        place: Place,
    ) -> Dispatched:
        """Returns the weighted sums."""
        tokens = jnp.where(choices.mask[..., None], x, 0).reshape(-1, x.shape[-1])
        tokens = jnp.broadcast_to(tokens[None], (place.num_experts, *tokens.shape))
        outputs = experts.batched(params, tokens)  # [E, T, D]
        chosen = choices.expert_ids[..., None] == jnp.arange(place.num_experts)[None, None, None]
        chosen = chosen & choices.mask[..., None, None]  # [B, S, K, E]
        dense = jnp.sum(jnp.where(chosen, choices.weights[..., None], 0.0), 2)
        dense = dense.reshape(-1, place.num_experts)  # [T, E]
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
        choices: Choices,
        place: Place,
    ) -> Dispatched:
        """Returns the weighted sums."""
        tokens, ids, weights = flat_choices(x, choices, place.num_experts)
        y, num_dropped = run_sorted(experts, params, tokens, ids, weights, place.num_experts)
        return Dispatched(y.reshape(x.shape), num_dropped)


def flat_choices(x: Array, choices: Choices, num_experts: int) -> tuple[Array, Array, Array]:
    """Returns (tokens [T, D], ids [T, K], weights [T, K]); E where a choice goes to no expert.

    None are the choices of padding, and those that name no expert from 0 to E - 1.
    """
    ids = choices.expert_ids
    num_choices = ids.shape[-1]
    goes = choices.mask[..., None] & (ids >= 0) & (ids < num_experts)
    ids = jnp.where(goes, ids, num_experts)
    weights = choices.weights.reshape(-1, num_choices)
    return x.reshape(-1, x.shape[-1]), ids.reshape(-1, num_choices), weights


def run_sorted(
    experts: Experts,
    params: Nested,
    x: Float[Array, "T D"],
    ids: Int[Array, "T K"],
    weights: Float[Array, "T K"],
    num_experts: int,
    max_rows: int | None = None,
) -> tuple[Float[Array, "T D"], Float[Array, ""]]:
    """Returns (each token's weighted sum over the experts held here, choices dropped).

    Args:
        experts: The experts.
        params: Weights of those held here.
        x: Tokens.
        ids: Experts held here, from 0; `num_experts` or more for a choice that goes to none.
        weights: Of the choices, float32.
        num_experts: How many are held here.
        max_rows: The most rows; the choices of the last tokens that are beyond it are dropped.
    """
    tokens, num_choices = ids.shape
    most = tokens * min(num_choices, num_experts)  # A token goes to each of its experts once.
    num_dropped = jnp.zeros((), jnp.float32)
    if max_rows is not None and max_rows < most:
        wanted = ids < num_experts
        kept = keep_first(wanted, max_rows)
        num_dropped = jnp.sum(wanted & ~kept, dtype=jnp.float32)
        ids, most = jnp.where(kept, ids, num_experts), max_rows
    row_map, group_sizes = sort_choices(jnp.minimum(ids, num_experts), num_experts, most)
    rows = keep_point(take_rows(x, row_map), "experts_input")
    outputs = experts.grouped(params, rows, group_sizes)
    return combine_rows(outputs, weights, row_map), num_dropped


def rows_within(factor: float | None, even: float, most: int) -> int:
    """Returns the rows of a buffer: `factor` times those of an even load, `most` at the most."""
    return most if factor is None else min(most, max(1, -int(-(factor * even) // 1)))


def check_factor(owner: Any, field: str) -> None:
    """Raises ValueError unless the field of the owner's config is above 0 and finite, or None."""
    value = getattr(owner.config, field)
    if value is not None and not 0 < value < math.inf:
        raise ValueError(
            f"{type(owner).__qualname__}.{field} is {value}; set it above 0, to a finite number."
        )
