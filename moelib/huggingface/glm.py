"""GLM-4.5, Solar Open and dots.llm1: grouped-query attention, MoE layers of DeepSeek-V3.

Sources: arXiv:2508.06471 and arXiv:2506.05767; for Solar Open, its published config.
"""

from typing import Any

from moelib.huggingface import blocks, deepseek_moe
from moelib.huggingface.family import Family
from moelib.huggingface.settings import Settings
from moelib.huggingface.tensor_mapping import Table
from moelib.models.causal_lm import CausalLM

IN_LAYER: Table = {**blocks.NORMS, **blocks.ATTENTION, **deepseek_moe.IN_LAYER}

_WINDOW = 4096  # The default of transformers for dots.llm1.


def _glm4_moe(settings: Settings) -> CausalLM.Config:
    attention = blocks.attention(
        settings,
        partial_rotary=True,
        qkv_bias=settings.take("attention_bias", False),
        qk_norm=blocks.norm(settings) if settings.take("use_qk_norm", False) else None,
    )
    dense = deepseek_moe.first_dense(settings)
    return deepseek_moe.multi_token_model(settings, attention, dense)


def _glm4_moe_settings(cfg: CausalLM.Config) -> dict[str, Any]:
    attention = blocks.layers_of(cfg.decoder)[0].self_attention
    return {
        **blocks.attention_settings(cfg, partial_rotary=True),
        **deepseek_moe.moe_settings(cfg),
        **deepseek_moe.first_dense_settings(cfg),
        **deepseek_moe.multi_token_settings(cfg),
        "attention_bias": attention.qkv_bias,
        "use_qk_norm": attention.qk_norm is not None,
    }


def _solar_open(settings: Settings) -> CausalLM.Config:
    settings.expect(first_k_dense_replace=0, use_qk_norm=False)
    attention = blocks.attention(settings, qkv_bias=settings.take("attention_bias", False))
    dense = [False] * settings.take("num_hidden_layers")
    return deepseek_moe.sigmoid_model(settings, attention, dense)


def _solar_open_settings(cfg: CausalLM.Config) -> dict[str, Any]:
    bias = blocks.layers_of(cfg.decoder)[0].self_attention.qkv_bias
    settings = deepseek_moe.moe_settings(cfg)
    del settings["intermediate_size"]
    return {**blocks.attention_settings(cfg), **settings, "attention_bias": bias}


def _dots1(settings: Settings) -> CausalLM.Config:
    settings.expect(use_sliding_window=False)
    attention = blocks.attention_with_bias(settings, qk_norm=blocks.norm(settings))
    first = settings.take("max_window_layers")
    has_window = settings.take("sliding_window") is not None
    windows = blocks.windows(settings, default=lambda n: has_window and n >= first)
    attentions = [attention.clone(window=window) for window in windows]
    dense = deepseek_moe.first_dense(settings)
    return deepseek_moe.sigmoid_model(settings, attentions, dense)


def _dots1_settings(cfg: CausalLM.Config) -> dict[str, Any]:
    return {
        **blocks.attention_settings(cfg),
        **blocks.window_settings(cfg, default=_WINDOW),
        **deepseek_moe.moe_settings(cfg),
        **deepseek_moe.first_dense_settings(cfg),
        "attention_bias": blocks.layers_of(cfg.decoder)[0].self_attention.qkv_bias,
    }


_DEFAULTS = {"n_group": 1, "routed_scaling_factor": 1.0, "topk_group": 1}  # Of all three.
_GLM_DEFAULTS = {
    **_DEFAULTS,
    "max_position_embeddings": 131072,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
}
GLM4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    _glm4_moe,
    _glm4_moe_settings,
    lambda cfg: IN_LAYER,
    defaults={**_GLM_DEFAULTS, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5},
    ignored=deepseek_moe.unused_layers,
    copies=deepseek_moe.copies,
)
SOLAR_OPEN = Family(
    "solar_open",
    "SolarOpenForCausalLM",
    _solar_open,
    _solar_open_settings,
    lambda cfg: IN_LAYER,
    defaults={**_GLM_DEFAULTS, "head_dim": 128, "rope_theta": 1e6},
)
DOTS1 = Family(
    "dots1",
    "Dots1ForCausalLM",
    _dots1,
    _dots1_settings,
    lambda cfg: IN_LAYER,
    defaults={
        **_DEFAULTS,
        "first_k_dense_replace": 0,
        "max_position_embeddings": 2048,
        "max_window_layers": 62,
        "norm_topk_prob": False,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6,
        "sliding_window": _WINDOW,
    },
)
