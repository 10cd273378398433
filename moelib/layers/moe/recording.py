"""Recording: the routing of MoE layers as module outputs, for programs that ask for it.

Shapes: B batch, S sequence, K experts per token.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, UInt

from moelib.core.context import inherited
from moelib.core.module import Module
from moelib.layers.moe.metrics import router_entropy
from moelib.layers.moe.router import Routing

ROUTING = "routing"  # Name of the module output.
RECORDING = "recording"  # `functional(..., inherited={RECORDING: True})` asks for the output.


class RecordedRouting(NamedTuple):
    """The routing of one layer; stacked over layers if it comes from a scan."""

    # Best first; E for padding, and for experts of the layer that no dispatcher sends tokens to.
    expert_ids: UInt[Array, "*L B S K"]
    weights: Float[Array, "*L B S K"]  # Combine weights, float16.
    entropy: Float[Array, "*L B S"]  # Entropy of the router's probabilities, nats, float16.
    mask: Bool[Array, "*L B S"]  # False for padding.


def expert_id_dtype(num_experts: int) -> np.dtype:
    """Returns the dtype of expert ids from 0 to E + 1, where E stands for no expert."""
    return np.min_scalar_type(num_experts + 1)


def record_routing(layer: Module, routing: Routing) -> None:
    """Adds the routing to the outputs of a layer, if `RECORDING` asks for it."""
    if not inherited(RECORDING):
        return
    num_experts, ids = layer.config.num_experts, routing.expert_ids
    valid = routing.mask[..., None] & (ids >= 0) & (ids < num_experts)
    recorded = RecordedRouting(
        jnp.where(valid, ids, num_experts).astype(expert_id_dtype(num_experts)),
        jnp.where(valid, routing.weights, 0.0).astype(jnp.float16),
        router_entropy(routing.probs).astype(jnp.float16),
        routing.mask,
    )
    layer.add_module_output(ROUTING, recorded)
