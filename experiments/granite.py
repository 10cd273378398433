"""Granite 3, and Granite 4 with Mamba-2 and attention in every tenth layer, as published."""

from collections.abc import Callable, Mapping
from typing import Any

from moelib.layers.moe.balance import BalanceScope
from moelib.train.trainer import SpmdTrainer

from .hub import Recipe, named_trainers

_GRANITE_4 = {
    "model_type": "granitemoehybrid",
    "vocab_size": 100_352,
    "num_hidden_layers": 40,
    "layer_types": ["attention" if n % 10 == 5 else "mamba" for n in range(40)],
    "position_embedding_type": "nope",
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
}

_GRANITE_3 = {
    "vocab_size": 49_155,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e7,
    "tie_word_embeddings": True,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
}

SIZES: Mapping[str, Mapping[str, Any]] = {
    "granite-3.1-8b": {
        **_GRANITE_3,
        "model_type": "granite",
        "hidden_size": 4096,
        "intermediate_size": 12_800,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "attention_multiplier": 0.0078125,
        "logits_scaling": 16.0,
    },
    "granite-3.1-3b-a800m": {
        **_GRANITE_3,
        "model_type": "granitemoe",
        "hidden_size": 1536,
        "intermediate_size": 512,
        "num_hidden_layers": 32,
        "num_attention_heads": 24,
        "num_local_experts": 40,
        "num_experts_per_tok": 8,
        "attention_multiplier": 0.015625,
        "logits_scaling": 6.0,
    },
    "granite-4.0-h-tiny": {
        **_GRANITE_4,
        "hidden_size": 1536,
        "intermediate_size": 512,
        "shared_intermediate_size": 1024,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "mamba_n_heads": 48,
        "num_local_experts": 64,
        "num_experts_per_tok": 6,
        "logits_scaling": 6.0,
    },
    "granite-4.0-h-small": {
        **_GRANITE_4,
        "hidden_size": 4096,
        "intermediate_size": 768,
        "shared_intermediate_size": 1536,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "mamba_n_heads": 128,
        "num_local_experts": 72,
        "num_experts_per_tok": 10,
        "logits_scaling": 16.0,
    },
}

RECIPES = {
    "granite-3.1-3b-a800m": Recipe(expert=8, balance=(1e-3, BalanceScope.GLOBAL_BATCH)),
    "granite-4.0-h-tiny": Recipe(expert=4, balance=(1e-3, BalanceScope.GLOBAL_BATCH)),
    "granite-4.0-h-small": Recipe(expert=8, balance=(1e-3, BalanceScope.GLOBAL_BATCH)),
}


def named_trainer_configs() -> Mapping[str, Callable[[], SpmdTrainer.Config]]:
    """Returns the configs by name."""
    return named_trainers(SIZES, RECIPES)
