"""GPT-OSS: sinks, alternating windows, biases, clamped SwiGLU. Source: arXiv:2508.10925."""

from typing import Any

from moelib.huggingface import blocks
from moelib.huggingface.family import Family
from moelib.huggingface.settings import Settings
from moelib.huggingface.tensor_mapping import Part, Table
from moelib.layers.activation import Activation
from moelib.layers.moe.experts import FeedForwardExperts
from moelib.layers.moe.router import Router, Score
from moelib.models.causal_lm import CausalLM

# Gate and up projections are interleaved in one tensor of all experts.
IN_LAYER: Table = {
    **blocks.NORMS,
    **blocks.ATTENTION,
    "feed_forward/router/weight": [Part("mlp.router.weight", "e d -> d e")],
    "feed_forward/router/bias": [Part("mlp.router.bias", "e -> e")],
    "feed_forward/experts/up": [Part("mlp.experts.gate_up_proj", "e d (f n) -> e n d f")],
    "feed_forward/experts/up_bias": [Part("mlp.experts.gate_up_proj_bias", "e (f n) -> e n f")],
    "feed_forward/experts/down": [Part("mlp.experts.down_proj", "e f d -> e f d")],
    "feed_forward/experts/down_bias": [Part("mlp.experts.down_proj_bias", "e d -> e d")],
}
_NAMES = "num_local_experts", "intermediate_size"  # Settings of `blocks.moe`.
_WINDOW = 128  # The class's default; transformers refuses null even if no layer uses it.


def _model(settings: Settings) -> CausalLM.Config:
    settings.expect(attention_bias=True, swiglu_limit=7.0, swiglu_alpha=1.702)
    settings.expect(experts_per_token=settings.take("num_experts_per_tok"))
    settings.skip("initial_context_length", "quantization_config")
    attention = blocks.attention(settings, qkv_bias=True, output_bias=True, sinks=True)
    moe = blocks.moe(
        settings,
        *_NAMES,
        router=Router.default_config().set(score=Score.SOFTMAX_AFTER_TOP_K, bias=True),
        experts=FeedForwardExperts.default_config().set(
            activation=Activation.CLAMPED_SWIGLU, bias=True
        ),
    )
    windows = blocks.windows(settings, default=lambda n: n % 2 == 0)
    attentions = [attention.clone(window=window) for window in windows]
    return blocks.model(settings, attentions, moe)


def _settings(cfg: CausalLM.Config) -> dict[str, Any]:
    return {
        **blocks.attention_settings(cfg),
        **blocks.moe_settings(cfg, *_NAMES),
        **blocks.balance_settings(cfg),
        "attention_bias": True,
        **blocks.window_settings(cfg, default=_WINDOW),
        "swiglu_limit": 7.0,
    }


GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    _model,
    _settings,
    lambda cfg: IN_LAYER,
    defaults={
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "rope_theta": 150000.0,
        "sliding_window": _WINDOW,
    },
)
