"""OLMoE, OLMo 2, OLMo 3 and FlexOlmo at their published sizes."""

from collections.abc import Callable, Mapping
from typing import Any

from moelib.layers.moe.balance import BalanceScope
from moelib.train.trainer import SpmdTrainer

from .hub import Recipe, named_trainers

_OLMO_2 = {
    "model_type": "olmo2",
    "vocab_size": 100_352,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500_000.0,
}

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
    "olmo-2-7b": _OLMO_2,
    "olmo-3-7b": {
        **_OLMO_2,
        "model_type": "olmo3",
        "vocab_size": 100_278,
        "max_position_embeddings": 65_536,
        "sliding_window": 4096,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    },
    "flexolmo-7x7b": {
        **_OLMO_2,
        "model_type": "flex_olmo",
        "num_experts": 7,
        "num_experts_per_tok": 5,
        "norm_topk_prob": False,
    },
}

RECIPES = {
    "olmoe-1b-7b": Recipe(expert=4, balance=(1e-2, BalanceScope.MICRO_BATCH)),
    "flexolmo-7x7b": Recipe(balance=(1e-2, BalanceScope.MICRO_BATCH)),
}


def named_trainer_configs() -> Mapping[str, Callable[[], SpmdTrainer.Config]]:
    """Returns the configs by name."""
    return named_trainers(SIZES, RECIPES)
