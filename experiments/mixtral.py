"""Mistral 7B, Mixtral and Mistral Small 4 at their published sizes."""

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
    "mistral-7b-v0.3": {
        "model_type": "mistral",
        "vocab_size": 32_768,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
    },
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
    "mistral-small-4": {
        "model_type": "mistral4",
        "vocab_size": 131_072,
        "hidden_size": 4096,
        "intermediate_size": 12_288,  # Used by no layer.
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 128.0,
            "original_max_position_embeddings": 8192,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        "q_lora_rank": 1024,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
}

RECIPES = {
    "mixtral-8x7b": Recipe(expert=8, balance=(2e-2, BalanceScope.MICRO_BATCH)),
    "mixtral-8x22b": Recipe(expert=8, balance=(1e-3, BalanceScope.MICRO_BATCH)),
    "mistral-small-4": Recipe(expert=16, balance=(1e-3, BalanceScope.GLOBAL_BATCH)),
}


def named_trainer_configs() -> Mapping[str, Callable[[], SpmdTrainer.Config]]:
    """Returns the configs by name."""
    return named_trainers(SIZES, RECIPES)
