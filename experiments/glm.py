"""GLM-4.5, GLM-4.5-Air, GLM-4.7-Flash and GLM-5 at their published sizes.

The balance loss and the rate of the balancing bias are those of the report of GLM-4.5,
arXiv:2508.06471.
"""

from collections.abc import Callable, Mapping
from typing import Any

from moelib.layers.moe.balance import BalanceScope
from moelib.train.trainer import SpmdTrainer

from .hub import Recipe, named_trainers

_GLM = {
    "model_type": "glm4_moe",
    "vocab_size": 151_552,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-5,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}

SIZES: Mapping[str, Mapping[str, Any]] = {
    "glm-4.5": {
        **_GLM,
        "hidden_size": 5120,
        "intermediate_size": 12_288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 92,
        "n_routed_experts": 160,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
    },
    "glm-4.5-air": {
        **_GLM,
        "hidden_size": 4096,
        "intermediate_size": 10_944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 46,
        "n_routed_experts": 128,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
        "use_qk_norm": False,
    },
    "glm-4.7-flash": {
        "model_type": "glm4_moe_lite",
        "vocab_size": 154_880,
        "hidden_size": 2048,
        "intermediate_size": 10_240,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
    },
    "glm-5": {
        "model_type": "glm_moe_dsa",
        "vocab_size": 154_880,
        "hidden_size": 6144,
        "intermediate_size": 12_288,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 78,
        "num_attention_heads": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "q_lora_rank": 2048,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "index_topk": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
}

_BALANCE: dict[str, Any] = {"balance": (1e-4, BalanceScope.SEQUENCE), "bias_rate": 1e-3}
RECIPES = {
    "glm-4.5": Recipe(expert=32, **_BALANCE),
    "glm-4.5-air": Recipe(expert=16, **_BALANCE),
    "glm-4.7-flash": Recipe(expert=8, **_BALANCE),
    "glm-5": Recipe(expert=32, **_BALANCE),
}


def named_trainer_configs() -> Mapping[str, Callable[[], SpmdTrainer.Config]]:
    """Returns the configs by name."""
    return named_trainers(SIZES, RECIPES)
