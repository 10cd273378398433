"""Mixtral at its published sizes."""

from collections.abc import Callable, Mapping
from typing import Any

from moelib.layers.moe.balance import BalanceScope
from moelib.train.trainer import SpmdTrainer

from .hub import Recipe, named_trainers

_MIXTRAL = {
    "model_type": "mixtral",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}

SIZES: Mapping[str, Mapping[str, Any]] = {
    "mixtral-8x7b": {
        **_MIXTRAL,
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "mixtral-8x22b": {
        **_MIXTRAL,
        "vocab_size": 32_000,
        "hidden_size": 6144,
        "intermediate_size": 16_384,
        "num_hidden_layers": 56,
        "num_attention_heads": 48,
    },
}

RECIPES = {
    "mixtral-8x7b": Recipe(expert=8, balance=(2e-2, BalanceScope.MICRO_BATCH)),
    "mixtral-8x22b": Recipe(expert=8, balance=(1e-3, BalanceScope.MICRO_BATCH)),
}


def named_trainer_configs() -> Mapping[str, Callable[[], SpmdTrainer.Config]]:
    """Returns the configs by name."""
    return named_trainers(SIZES, RECIPES)
