"""Kimi Linear at its published size. Its bias balances the load at the rate of DeepSeek-V3."""

from collections.abc import Callable, Mapping
from typing import Any

from moelib.train.trainer import SpmdTrainer

from .hub import Recipe, named_trainers

SIZES: Mapping[str, Mapping[str, Any]] = {
    "kimi-linear-48b-a3b": {
        "model_type": "kimi_linear",
        "vocab_size": 163_840,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "moe_intermediate_size": 1024,
        "num_hidden_layers": 27,
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-5,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],  # From 1; the others are linear.
            "num_heads": 32,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
        "mla_use_nope": True,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_experts": 256,
        "num_shared_experts": 1,
        "num_experts_per_token": 8,
        "first_k_dense_replace": 1,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": 2.446,
    },
}

RECIPES = {"kimi-linear-48b-a3b": Recipe(expert=16, bias_rate=1e-3)}


def named_trainer_configs() -> Mapping[str, Callable[[], SpmdTrainer.Config]]:
    """Returns the configs by name."""
    return named_trainers(SIZES, RECIPES)
