"""Tracing: arrays inside layers as module outputs, for programs that ask for them."""

from collections.abc import Callable

from jaxtyping import Array

from moelib.core.context import inherited
from moelib.core.module import Module

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
