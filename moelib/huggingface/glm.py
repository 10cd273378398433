"""GLM-4.5, Solar Open, dots.llm1, K-EXAONE and Hy3: grouped-query attention, DeepSeek-V3's router.

Sources: arXiv:2508.06471 and arXiv:2506.05767; for the others, their published configs.
"""

import functools
from typing import Any

from moelib.huggingface import blocks, deepseek_moe
from moelib.huggingface.family import Family
from moelib.huggingface.settings import Settings
from moelib.huggingface.tensor_mapping import Part, Table
from moelib.models.causal_lm import CausalLM

IN_LAYER: Table = {**blocks.NORMS, **blocks.ATTENTION, **deepseek_moe.IN_LAYER}
_BIAS = "feed_forward/router/bias_balancing/bias"
EXAONE_IN_LAYER: Table = {**IN_LAYER, _BIAS: [Part("mlp.e_score_correction_bias", "e -> e")]}
HY_IN_LAYER: Table = {
    **IN_LAYER,
    _BIAS: [Part("mlp.expert_bias", "e -> e")],
    "feed_forward/router/weight": [Part("mlp.router.gate.weight", "e d -> d e")],
    **blocks.feed_forward_table("feed_forward/shared_experts", "mlp.shared_mlp"),
}

_WINDOW = 4096  # The default of transformers.
_EXAONE = deepseek_moe.Names("num_experts", num_shared="num_shared_experts")
_HY = _EXAONE._replace(scaling_factor="router_scaling_factor")


def _glm4_moe(settings: Settings) -> CausalLM.Config:
    attention = blocks.attention(
        settings,
        partial_rotary=True,
        qkv_bias=settings.take("attention_bias", False),
        qk_norm=blocks.norm(settings) if settings.take("use_qk_norm", False) else None,
    )
    dense = deepseek_moe.first_dense(settings)
    return deepseek_moe.multi_token_model(settings, attention, dense)


def _solar_open(settings: Settings) -> CausalLM.Config:
    settings.expect(first_k_dense_replace=0, use_qk_norm=False)
    attention = blocks.attention(settings, qkv_bias=settings.take("attention_bias", False))
    dense = [False] * settings.take("num_hidden_layers")
    return deepseek_moe.sigmoid_model(settings, attention, dense)


def _dots1(settings: Settings) -> CausalLM.Config:
    settings.expect(use_sliding_window=False)
    attention = blocks.attention_with_bias(settings, qk_norm=blocks.norm(settings))
    first = settings.take("max_window_layers")
    has_window = settings.take("sliding_window") is not None
    windows = blocks.windows(settings, default=lambda n: has_window and n >= first)
    attentions = [attention.clone(window=window) for window in windows]
    dense = deepseek_moe.first_dense(settings)
    if settings.values.get("scoring_func") == "noaux_tc":  # As published, with sigmoid scores.
        settings.values["scoring_func"] = "sigmoid"
    return deepseek_moe.sigmoid_model(settings, attentions, dense)


def _exaone_moe(settings: Settings) -> CausalLM.Config:
    attention = blocks.attention(settings, qk_norm=blocks.norm(settings))
    every = settings.take("sliding_window_pattern")
    windows = blocks.windows(settings, default=lambda n: bool((n + 1) % every))
    # Layers with a window have positions, the others none, unless no layer may have a window.
    everywhere = settings.take("sliding_window") is None
    attentions = [
        attention.clone(window=window, rope=attention.rope if window or everywhere else None)
        for window in windows
    ]
    dense = deepseek_moe.listed_dense(settings, settings.take("first_k_dense_replace"))
    settings.expect(is_moe_layer=[not each for each in dense])
    settings.skip("num_nextn_predict_layers")  # transformers reads no such modules.
    return deepseek_moe.sigmoid_model(settings, attentions, dense, _EXAONE)


def _hy_v3(settings: Settings) -> CausalLM.Config:
    # The router of transformers always renormalizes, and has no groups.
    settings.expect(qk_norm=True, norm_topk_prob=True, n_group=1, topk_group=1)
    # The precision of a sum, and modules that transformers does not read.
    settings.skip("enable_moe_fp32_combine", "num_nextn_predict_layers")
    attention = blocks.attention_with_bias(settings, qk_norm=blocks.norm(settings))
    dense = deepseek_moe.listed_dense(settings, num_dense=1)
    return deepseek_moe.sigmoid_model(settings, attention, dense, _HY)


def _settings(
    cfg: CausalLM.Config,
    names: deepseek_moe.Names = deepseek_moe.NAMES,
    *,
    partial_rotary: bool = False,
) -> dict[str, Any]:
    attention = blocks.layers_of(cfg.decoder)[0].self_attention
    return {
        **blocks.attention_settings(cfg, partial_rotary=partial_rotary),
        **blocks.window_settings(cfg, default=_WINDOW),
        **deepseek_moe.moe_settings(cfg, names),
        "attention_bias": attention.qkv_bias,
        "use_qk_norm": attention.qk_norm is not None,
    }


_DEFAULTS = {
    "max_position_embeddings": 131072,
    "n_group": 1,
    "norm_topk_prob": True,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
}
_GLM_DEFAULTS = {**_DEFAULTS, "n_shared_experts": 1}
GLM4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    _glm4_moe,
    functools.partial(_settings, partial_rotary=True),
    lambda cfg: IN_LAYER,
    defaults={**_GLM_DEFAULTS, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5},
    ignored=deepseek_moe.unused_layers,
    copies=deepseek_moe.copies,
)
SOLAR_OPEN = Family(
    "solar_open",
    "SolarOpenForCausalLM",
    _solar_open,
    _settings,
    lambda cfg: IN_LAYER,
    defaults={**_GLM_DEFAULTS, "head_dim": 128, "rope_theta": 1e6},
)
DOTS1 = Family(
    "dots1",
    "Dots1ForCausalLM",
    _dots1,
    _settings,
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
EXAONE_MOE = Family(
    "exaone_moe",
    "ExaoneMoeForCausalLM",
    _exaone_moe,
    functools.partial(_settings, names=_EXAONE),
    lambda cfg: EXAONE_IN_LAYER,
    defaults={
        **_DEFAULTS,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 2048,
        "num_key_value_heads": 32,
        "num_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "sliding_window": _WINDOW,
        "sliding_window_pattern": 4,
    },
    ignored=lambda cfg: (r"mtp\..*",),
)
HY_V3 = Family(
    "hy_v3",
    "HYV3ForCausalLM",
    _hy_v3,
    functools.partial(_settings, names=_HY),
    lambda cfg: HY_IN_LAYER,
    defaults={
        **_DEFAULTS,
        "head_dim": 128,
        "num_shared_experts": 1,
        "rope_theta": 11_158_840.0,
        "router_scaling_factor": 2.826,
    },
    ignored=deepseek_moe.unused_layers,
)
