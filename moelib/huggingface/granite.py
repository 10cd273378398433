"""Granite, dense and with experts: factors of embeddings, scores, outputs and logits.

Sources: https://github.com/ibm-granite/granite-3.0-language-models and arXiv:2408.13359.
"""

from typing import Any

from moelib.huggingface import blocks, llama
from moelib.huggingface.family import Family
from moelib.huggingface.settings import Settings
from moelib.huggingface.tensor_mapping import Part, Table
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.moe.layer import MoELayer
from moelib.layers.moe.router import Router, Score
from moelib.models.causal_lm import CausalLM

# Gate and up projections are one tensor, of all experts.
IN_LAYER: Table = {
    **llama.IN_LAYER,
    "feed_forward/router/weight": [Part("block_sparse_moe.router.layer.weight", "e d -> d e")],
    "feed_forward/experts/up": [
        Part("block_sparse_moe.input_linear.weight", "e (n f) d -> e n d f")
    ],
    "feed_forward/experts/down": [Part("block_sparse_moe.output_linear.weight", "e d f -> e f d")],
    "feed_forward/shared_experts/up": [Part("shared_mlp.input_linear.weight", "(n f) d -> n d f")],
    "feed_forward/shared_experts/down": [Part("shared_mlp.output_linear.weight", "d f -> f d")],
}
MOE = "num_local_experts", "intermediate_size"  # Settings of `blocks.moe`.


def _factor(settings: Settings, name: str, without: float = 1.0) -> float | None:
    """Returns a factor; None for the value that it has without the setting."""
    value = float(settings.take(name))
    return None if value == without else value


def attention_of(settings: Settings, **fields: Any) -> GroupedQueryAttention.Config:
    """Returns attention with `attention_multiplier`."""
    attention = blocks.attention_with_bias(settings, **fields)
    usual = blocks.expect(attention.head_dim, int) ** -0.5
    return attention.set(score_scale=_factor(settings, "attention_multiplier", without=usual))


def model_of(settings: Settings, feed_forward: Any, mixers: Any = None) -> CausalLM.Config:
    """Returns the model with Granite's factors; `mixers` are by default attention."""
    mixers = mixers or attention_of(settings)
    embedding_scale = _factor(settings, "embedding_multiplier")
    logit_divisor = _factor(settings, "logits_scaling")
    residual_scale = _factor(settings, "residual_multiplier")
    cfg = blocks.model(settings, mixers, feed_forward, residual_scale=residual_scale)
    cfg.embedding.scale = embedding_scale
    return cfg.set(logit_divisor=logit_divisor)


def settings_of(cfg: CausalLM.Config) -> dict[str, Any]:
    """Returns the settings that `model_of` and `attention_of` read."""
    layer, settings = cfg.decoder.block[0], blocks.attention_settings(cfg)
    attention = blocks.attention_of(cfg)
    return {
        **settings,
        "attention_bias": attention.qkv_bias,
        "attention_multiplier": attention.score_scale or settings["head_dim"] ** -0.5,
        "embedding_multiplier": cfg.embedding.scale or 1.0,
        "logits_scaling": cfg.logit_divisor or 1.0,
        "residual_multiplier": layer.residual_scale or 1.0,
    }


def _dense(settings: Settings) -> CausalLM.Config:
    settings.expect(mlp_bias=False)
    return model_of(settings, blocks.feed_forward(settings.take("intermediate_size")))


def _dense_settings(cfg: CausalLM.Config) -> dict[str, Any]:
    hidden_dim = cfg.decoder.block[0].feed_forward.hidden_dim
    return {**settings_of(cfg), "intermediate_size": hidden_dim}


def moe_of(settings: Settings) -> MoELayer.Config:
    """Returns the layer of experts, shared ones of `shared_intermediate_size` among them."""
    router = Router.default_config().set(score=Score.SOFTMAX_AFTER_TOP_K)
    moe = blocks.moe(settings, *MOE, router=router)
    if shared := settings.take("shared_intermediate_size", 0):
        moe.shared_experts = blocks.feed_forward(shared)
    return moe


def _moe(settings: Settings) -> CausalLM.Config:
    return model_of(settings, moe_of(settings))


def _moe_settings(cfg: CausalLM.Config) -> dict[str, Any]:
    return {
        **settings_of(cfg),
        **blocks.moe_settings(cfg, *MOE),
        **blocks.balance_settings(cfg),
    }


def shared_settings(cfg: CausalLM.Config) -> dict[str, Any]:
    """Returns the settings that `model_of` and `moe_of` read."""
    shared = blocks.moe_of(cfg).shared_experts
    return {**_moe_settings(cfg), "shared_intermediate_size": shared.hidden_dim if shared else 0}


DEFAULTS = {
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "max_position_embeddings": 2048,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "residual_multiplier": 1.0,
    "rms_norm_eps": 1e-6,
}
GRANITE = Family(
    "granite",
    "GraniteForCausalLM",
    _dense,
    _dense_settings,
    lambda cfg: IN_LAYER,
    defaults=DEFAULTS,
)
GRANITEMOE = Family(
    "granitemoe",
    "GraniteMoeForCausalLM",
    _moe,
    _moe_settings,
    lambda cfg: IN_LAYER,
    defaults=DEFAULTS,
)
GRANITEMOESHARED = Family(
    "granitemoeshared",
    "GraniteMoeSharedForCausalLM",
    _moe,
    shared_settings,
    lambda cfg: IN_LAYER,
    defaults=DEFAULTS,
)
