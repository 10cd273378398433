"""Tracing: arrays inside layers as module outputs, for programs that ask for them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moelib.core.context import inherited
from moelib.core.module import Module
from moelib.kernels.backend import kernel_backends
from moelib.kernels.flash_attention import MaskSpec
from moelib.layers.attention.on_mesh import attend

# `functional(..., inherited={TRACED: names})` asks for the outputs of these names.
TRACED = "traced"
HIDDEN = "hidden"  # [B, S, D] residual stream after a layer.
ATTENTION_WEIGHTS = "attention_weights"  # [B, S, H, S] of each query, head and key.
ROUTER_PROBS = "router_probs"  # [B, S, E].
EXPERT_IDS = "expert_ids"  # [B, S, K], best first; negative for none.
EXPERT_WEIGHTS = "expert_weights"  # [B, S, K] combine weights.
NAMES = HIDDEN, ATTENTION_WEIGHTS, ROUTER_PROBS, EXPERT_IDS, EXPERT_WEIGHTS


def trace(layer: Module, name: str, value: Callable[[], Array]) -> None:
    """Adds an array to the outputs of a layer, if the program asks for it."""
    if name in (inherited(TRACED) or ()):
        layer.add_module_output(name, value())


def attention_weights(
    q: Float[Array, "B S H Dh"],
    k: Float[Array, "B S G Dh"],
    segment_ids: Int[Array, "B S"] | None,
    sinks: Float[Array, "H"] | None,
    spec: MaskSpec,
) -> Float[Array, "B S H S"]:
    """Returns the weight of each key for each query and head, by attention to one-hot values."""
    one_hot = jnp.eye(k.shape[1], dtype=jnp.float32)[None, :, None]
    values = jnp.broadcast_to(one_hot, (*k.shape[:3], k.shape[1]))
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    with kernel_backends({"flash_attention": "xla"}):
        return jax.lax.stop_gradient(attend(q, k, values, segment_ids, sinks, spec=spec))
