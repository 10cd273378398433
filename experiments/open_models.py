"""Open models at their published sizes: Llama 3, Qwen, Mixtral, OLMoE, DeepSeek.

Sizes are the settings of their config.json on the Hugging Face hub, which `moelib.models.
huggingface` reads as it reads a model's folder: weights of the hub load into these models. GPT-OSS
has a file of its own.

Most were trained on data and by recipes that are not public: theirs here is the ordinary one of
`experiments.jobs`. That of qwen3-30b-a3b is PithTrain's published validation run: 4,096 steps of
1,024 rows of 2,048 tokens of DCLM, 2e-4 to 1e-5 after 128 steps of warmup, no weight decay, a
balance loss of 1e-3 over the global batch.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from moelib.core.config import config_for_function
from moelib.layers.feed_forward import FeedForward
from moelib.layers.initializers import normal
from moelib.layers.moe.balance import BalanceScope, LoadBalanceLoss
from moelib.layers.remat import remat
from moelib.models.causal_lm import CausalLM
from moelib.models.huggingface.families import read_model
from moelib.train.trainer import SpmdTrainer

from .jobs import CHIPS, Job, trainer

_LLAMA = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
}
_LLAMA_31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
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
_MIXTRAL = {
    "model_type": "mixtral",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
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

SIZES: Mapping[str, Mapping[str, Any]] = {
    "llama-3.2-1b": {
        **_LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rope_scaling": {**_LLAMA_31, "factor": 32.0},
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_scaling": _LLAMA_31,
    },
    "llama-3.1-70b": {
        **_LLAMA,
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "rope_scaling": _LLAMA_31,
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
        "intermediate_size": 6144,  # Of no layer.
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
    },
    "qwen3-235b-a22b": {
        **_QWEN3_MOE,
        "hidden_size": 4096,
        "intermediate_size": 12_288,  # Of no layer.
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
    },
    "qwen2-57b-a14b": {
        "model_type": "qwen2_moe",
        "vocab_size": 151_936,
        "hidden_size": 3584,
        "intermediate_size": 18_944,  # Of no layer.
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

# Experts of a model are split over as many devices.
_EXPERT_PARALLEL = {
    "qwen3-30b-a3b": 8,
    "qwen3-235b-a22b": 16,
    "qwen2-57b-a14b": 8,
    "mixtral-8x7b": 8,
    "mixtral-8x22b": 8,
    "olmoe-1b-7b": 4,
    "deepseek-v2-lite": 8,
    "deepseek-v2": 16,
    "deepseek-v3": 32,
}

# The weight and scope of balance losses; no line, no loss.
_BALANCE = {
    "qwen3-30b-a3b": (1e-3, BalanceScope.GLOBAL_BATCH),
    "qwen3-235b-a22b": (1e-3, BalanceScope.GLOBAL_BATCH),
    "qwen2-57b-a14b": (1e-3, BalanceScope.MICRO_BATCH),
    "mixtral-8x7b": (2e-2, BalanceScope.MICRO_BATCH),
    "mixtral-8x22b": (1e-3, BalanceScope.MICRO_BATCH),
    "olmoe-1b-7b": (1e-2, BalanceScope.MICRO_BATCH),
    "deepseek-v2-lite": (3e-3, BalanceScope.SEQUENCE),
    "deepseek-v2": (3e-3, BalanceScope.SEQUENCE),
    "deepseek-v3": (1e-4, BalanceScope.SEQUENCE),
}


def model(name: str) -> CausalLM.Config:
    """Returns a model, ready to be trained: N(0, 0.02) weights, blocks recomputed, its balance."""
    _, cfg = read_model(SIZES[name], name)
    cfg.param_init = config_for_function(normal).set(std=0.02)
    cfg.decoder.remat = config_for_function(remat)
    if name in _BALANCE:
        weight, scope = _BALANCE[name]
        for layer in (*cfg.decoder.first_layers, *cfg.decoder.block):
            if not isinstance(layer.feed_forward, FeedForward.Config):
                layer.feed_forward.load_balance_loss = LoadBalanceLoss.default_config().set(
                    weight=weight, scope=scope
                )
    return cfg


def _trainer(name: str) -> SpmdTrainer.Config:
    meshes = {CHIPS: {"fsdp": -1, "expert": _EXPERT_PARALLEL.get(name, 1)}}
    job = Job(seq_len=4096, rows=512, meshes=meshes)
    if name == "qwen3-30b-a3b":
        job = job._replace(
            seq_len=2048, rows=1024, max_step=4096, peak_lr=2e-4, end_lr=1e-5, warmup_steps=128
        )
        job = job._replace(weight_decay=0.0)
    return trainer(model(name), job)


def named_trainer_configs() -> Mapping[str, Callable[[], SpmdTrainer.Config]]:
    """Returns the configs by name."""
    return {name: functools.partial(_trainer, name) for name in SIZES}
