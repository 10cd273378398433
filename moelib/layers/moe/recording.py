"""Recording: the routing of MoE layers as module outputs, for programs that ask for it.

Shapes: B batch, S sequence, K experts per token.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt

from moelib.core.module import Module
from moelib.core.routing_file import expert_id_dtype
from moelib.layers.moe.metrics import router_entropy
from moelib.layers.moe.router import Routing

ROUTING = "routing"  # Name of the module output.
_recording: ContextVar[bool] = ContextVar("moelib_recording_routing", default=False)


class RecordedRouting(NamedTuple):
    """The routing of one layer; stacked over layers if it comes from a scan."""

    expert_ids: UInt[Array, "*L B S K"]  # Best first; E for no (dispatched) expert.
    weights: Float[Array, "*L B S K"]  # Combine weights, float16.
    entropy: Float[Array, "*L B S"]  # Entropy of the router's probabilities, nats, float16.
    mask: Bool[Array, "*L B S"]  # False for padding.


@contextlib.contextmanager
def recording_routing() -> Iterator[None]:
    """Makes the MoE layers that are traced inside the block output their routing."""
    token = _recording.set(True)
    try:
        yield
    finally:
        _recording.reset(token)


def record_routing(layer: Module, routing: Routing, num_experts: int) -> None:
    """Adds the routing to the outputs of a layer, inside `recording_routing`.

    Args:
        layer: The layer.
        routing: Its routing.
        num_experts: E; ids from E on, of experts that are computed where the tokens are, are
            recorded as no expert.
    """
    if not _recording.get():
        return
    ids = routing.expert_ids
    valid = routing.mask[..., None] & (ids >= 0) & (ids < num_experts)
    recorded = RecordedRouting(
        jnp.where(valid, ids, num_experts).astype(expert_id_dtype(num_experts)),
        jnp.where(valid, routing.weights, 0.0).astype(jnp.float16),
        router_entropy(routing.probs).astype(jnp.float16),
        routing.mask,
    )
    layer.add_module_output(ROUTING, recorded)
