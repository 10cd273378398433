"""Nemotron 3 Nano at its published size, with the published balance of its experts."""

from collections.abc import Callable, Mapping
from typing import Any

from moelib.layers.moe.balance import BalanceScope
from moelib.train.trainer import SpmdTrainer

from .hub import Recipe, named_trainers

SIZES: Mapping[str, Mapping[str, Any]] = {
    "nemotron-3-nano-30b-a3b": {
        "model_type": "nemotron_h",
        "vocab_size": 131_072,
        "hidden_size": 2688,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "layer_norm_epsilon": 1e-5,
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
}

RECIPES = {
    "nemotron-3-nano-30b-a3b": Recipe(
        expert=8, balance=(1e-4, BalanceScope.SEQUENCE), bias_rate=1e-3
    )
}


def named_trainer_configs() -> Mapping[str, Callable[[], SpmdTrainer.Config]]:
    """Returns the configs by name."""
    return named_trainers(SIZES, RECIPES)
