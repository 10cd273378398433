"""DeepSeek-V2, V3 and V3.2, and Kimi K2, which is a DeepSeek-V3, at their published sizes.

Kimi K2 is balanced as DeepSeek-V3.
"""

from collections.abc import Callable, Mapping
from typing import Any

from moelib.layers.moe.balance import BalanceScope
from moelib.train.trainer import SpmdTrainer

from .hub import Recipe, named_trainers

_DEEPSEEK_V2 = {
    "model_type": "deepseek_v2",
    "vocab_size": 102_400,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
}

SIZES: dict[str, Mapping[str, Any]] = {
    "deepseek-v2-lite": {
        **_DEEPSEEK_V2,
        "hidden_size": 2048,
        "intermediate_size": 10_944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "q_lora_rank": None,
        "n_routed_experts": 64,
        "topk_method": "greedy",
        "routed_scaling_factor": 1.0,
    },
    "deepseek-v2": {
        **_DEEPSEEK_V2,
        "hidden_size": 5120,
        "intermediate_size": 12_288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 60,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "n_routed_experts": 160,
        "topk_method": "group_limited_greedy",
        "n_group": 8,
        "topk_group": 3,
        "routed_scaling_factor": 16.0,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "vocab_size": 129_280,
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "rope_scaling": {**_DEEPSEEK_V2["rope_scaling"], "mscale": 1.0, "mscale_all_dim": 1.0},
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
}
SIZES["kimi-k2"] = {
    **SIZES["deepseek-v3"],
    "model_type": "kimi_k2",
    "vocab_size": 163_840,
    "num_attention_heads": 64,
    "rope_theta": 50_000.0,
    "rope_scaling": {
        **SIZES["deepseek-v3"]["rope_scaling"],
        "factor": 32.0,
        "beta_fast": 1.0,
    },
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
}
SIZES["deepseek-v3.2"] = {
    **SIZES["deepseek-v3"],
    "model_type": "deepseek_v32",
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
}
# With the module that predicts a second token, which the published 671 B parameters exclude.
SIZES["deepseek-v3-mtp"] = {**SIZES["deepseek-v3"], "num_nextn_predict_layers": 1}

_V3 = Recipe(expert=32, balance=(1e-4, BalanceScope.SEQUENCE), bias_rate=1e-3)
RECIPES = {
    "deepseek-v2-lite": Recipe(expert=8, balance=(3e-3, BalanceScope.SEQUENCE)),
    "deepseek-v2": Recipe(expert=16, balance=(3e-3, BalanceScope.SEQUENCE)),
    "deepseek-v3": _V3,
    "deepseek-v3-mtp": _V3,
    "deepseek-v3.2": _V3,
    "kimi-k2": _V3,
}


def named_trainer_configs() -> Mapping[str, Callable[[], SpmdTrainer.Config]]:
    """Returns the configs by name."""
    return named_trainers(SIZES, RECIPES)
