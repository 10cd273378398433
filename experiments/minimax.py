"""MiniMax-M2 at its published size. Its bias balances the load at the rate of DeepSeek-V3."""

from collections.abc import Callable, Mapping
from typing import Any

from moelib.train.trainer import SpmdTrainer

from .hub import Recipe, named_trainers

SIZES: Mapping[str, Mapping[str, Any]] = {
    "minimax-m2": {
        "model_type": "minimax_m2",
        "vocab_size": 200_064,
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e6,
        "rotary_dim": 64,
    },
}

RECIPES = {"minimax-m2": Recipe(expert=32, bias_rate=1e-3)}


def named_trainer_configs() -> Mapping[str, Callable[[], SpmdTrainer.Config]]:
    """Returns the configs by name."""
    return named_trainers(SIZES, RECIPES)
