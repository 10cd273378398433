"""Solar Open at its published size. Its bias balances the load at the rate of DeepSeek-V3."""

from collections.abc import Callable, Mapping
from typing import Any

from moelib.train.trainer import SpmdTrainer

from .hub import Recipe, named_trainers

SIZES: Mapping[str, Mapping[str, Any]] = {
    "solar-open-100b": {
        "model_type": "solar_open",
        "vocab_size": 196_608,
        "hidden_size": 4096,
        "intermediate_size": 10_240,  # Used by no layer.
        "moe_intermediate_size": 1280,
        "num_hidden_layers": 48,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "rope_scaling": {
            "type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 65_536,
        },
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
}

RECIPES = {"solar-open-100b": Recipe(expert=16, bias_rate=1e-3)}


def named_trainer_configs() -> Mapping[str, Callable[[], SpmdTrainer.Config]]:
    """Returns the configs by name."""
    return named_trainers(SIZES, RECIPES)
