"""Qwen2, Qwen2.5, Qwen3, Qwen3-Next and the text part of Qwen3.5 at their published sizes.

qwen3-30b-a3b has the recipe of PithTrain's published validation run: 4,096 steps of 1,024 sequences
of 2,048 tokens of DCLM, a learning rate from 2e-4 to 1e-5 after 128 steps of warmup, no weight
decay, and a balance loss of weight 1e-3 over the global batch.
"""

from collections.abc import Callable, Mapping
from typing import Any

from moelib.layers.moe.balance import BalanceScope
from moelib.train.trainer import SpmdTrainer

from .hub import Recipe, named_trainers

_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
_QWEN3_MOE = {
    **_QWEN3,
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}

_QWEN2_5 = {"model_type": "qwen2", "rms_norm_eps": 1e-6, "rope_theta": 1e6}

_WITH_STATES = {
    "hidden_size": 2048,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "rope_theta": 1e7,
    "rms_norm_eps": 1e-6,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}

SIZES: Mapping[str, Mapping[str, Any]] = {
    "qwen2.5-0.5b": {
        **_QWEN2_5,
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        **_QWEN2_5,
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "qwen3-0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "qwen3-30b-a3b": {
        **_QWEN3_MOE,
        "hidden_size": 2048,
        "intermediate_size": 6144,  # Used by no layer.
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
    },
    "qwen3-235b-a22b": {
        **_QWEN3_MOE,
        "hidden_size": 4096,
        "intermediate_size": 12_288,  # Used by no layer.
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
    },
    "qwen2-57b-a14b": {
        "model_type": "qwen2_moe",
        "vocab_size": 151_936,
        "hidden_size": 3584,
        "intermediate_size": 18_944,  # Used by no layer.
        "moe_intermediate_size": 2560,
        "shared_expert_intermediate_size": 20_480,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
    },
    "qwen3.5-35b-a3b": {
        **_WITH_STATES,
        "model_type": "qwen3_5_moe_text",
        "vocab_size": 248_320,
        "num_hidden_layers": 40,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    "qwen3-next-80b-a3b": {
        **_WITH_STATES,
        "model_type": "qwen3_next",
        "vocab_size": 151_936,
        "intermediate_size": 5120,  # Used by no layer.
        "num_hidden_layers": 48,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
    },
}

RECIPES = {
    "qwen3-30b-a3b": Recipe(
        expert=8,
        balance=(1e-3, BalanceScope.GLOBAL_BATCH),
        job={
            "seq_len": 2048,
            "batch_size": 1024,
            "max_step": 4096,
            "peak_lr": 2e-4,
            "end_lr": 1e-5,
            "warmup_steps": 128,
            "weight_decay": 0.0,
        },
    ),
    "qwen3-235b-a22b": Recipe(expert=16, balance=(1e-3, BalanceScope.GLOBAL_BATCH)),
    "qwen3.5-35b-a3b": Recipe(expert=16, balance=(1e-3, BalanceScope.GLOBAL_BATCH)),
    "qwen3-next-80b-a3b": Recipe(expert=16, balance=(1e-3, BalanceScope.GLOBAL_BATCH)),
    "qwen2-57b-a14b": Recipe(expert=8, balance=(1e-3, BalanceScope.MICRO_BATCH)),
}


def named_trainer_configs() -> Mapping[str, Callable[[], SpmdTrainer.Config]]:
    """Returns the configs by name."""
    return named_trainers(SIZES, RECIPES)
