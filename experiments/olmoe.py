"""OLMoE at its published size."""

from collections.abc import Callable, Mapping
from typing import Any

from moelib.layers.moe.balance import BalanceScope
from moelib.train.trainer import SpmdTrainer

from .hub import Recipe, named_trainers

SIZES: Mapping[str, Mapping[str, Any]] = {
    "olmoe-1b-7b": {
        "model_type": "olmoe",
        "vocab_size": 50_304,
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
    },
}

RECIPES = {
    "olmoe-1b-7b": Recipe(expert=4, balance=(1e-2, BalanceScope.MICRO_BATCH)),
}


def named_trainer_configs() -> Mapping[str, Callable[[], SpmdTrainer.Config]]:
    """Returns the configs by name."""
    return named_trainers(SIZES, RECIPES)
