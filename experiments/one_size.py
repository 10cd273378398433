"""Models of which one size is known here, as it is published, in alphabetical order.

Biases of routers balance the load at the rate of DeepSeek-V3.
"""

from collections.abc import Callable, Mapping
from typing import Any

from moelib.layers.moe.balance import BalanceScope
from moelib.train.trainer import SpmdTrainer

from .hub import Recipe, named_trainers

SIZES: Mapping[str, Mapping[str, Any]] = {
    "dbrx": {
        "model_type": "dbrx",
        "vocab_size": 100_352,
        "d_model": 6144,
        "n_layers": 40,
        "n_heads": 48,
        "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500_000},
        "ffn_config": {
            "ffn_act_fn": {"name": "silu"},
            "ffn_hidden_size": 10_752,
            "moe_num_experts": 16,
            "moe_top_k": 4,
            "moe_normalize_expert_weights": 1,
        },
    },
    "dots.llm1": {
        "model_type": "dots1",
        "vocab_size": 152_064,
        "hidden_size": 4096,
        "intermediate_size": 10_944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e7,
        "sliding_window": None,
        "n_routed_experts": 128,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "noaux_tc",
    },
    "ernie-4.5-21b-a3b": {
        "model_type": "ernie4_5_moe",
        "vocab_size": 103_424,
        "hidden_size": 2560,
        "intermediate_size": 12_288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "moe_num_experts": 64,
        "moe_k": 6,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
    },
    "hunyuan-a13b": {
        "model_type": "hunyuan_v1_moe",
        "vocab_size": 128_167,
        "hidden_size": 4096,
        "intermediate_size": 3072,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
        "tie_word_embeddings": True,
        "num_experts": 64,
        "moe_topk": 8,
    },
    "k-exaone-236b-a23b": {
        "model_type": "exaone_moe",
        "vocab_size": 153_600,
        "hidden_size": 6144,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": 128,
        "sliding_window_pattern": 4,
        "num_experts": 128,
        "num_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    "minimax-m2": {
        "model_type": "minimax_m2",
        "vocab_size": 200_064,
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e6,
        "rotary_dim": 64,
    },
    "smollm3-3b": {
        "model_type": "smollm3",
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 11_008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e6,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
    },
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

RECIPES = {
    "dbrx": Recipe(expert=16, balance=(1e-2, BalanceScope.MICRO_BATCH)),
    "dots.llm1": Recipe(expert=16, bias_rate=1e-3),
    "ernie-4.5-21b-a3b": Recipe(expert=8, bias_rate=1e-3),
    "hunyuan-a13b": Recipe(expert=16, balance=(1e-3, BalanceScope.GLOBAL_BATCH)),
    "k-exaone-236b-a23b": Recipe(expert=16, bias_rate=1e-3),
    "minimax-m2": Recipe(expert=32, bias_rate=1e-3),
    "solar-open-100b": Recipe(expert=16, bias_rate=1e-3),
}


def named_trainer_configs() -> Mapping[str, Callable[[], SpmdTrainer.Config]]:
    """Returns the configs by name."""
    return named_trainers(SIZES, RECIPES)
