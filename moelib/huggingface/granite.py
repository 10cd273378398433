"""Granite, dense and with experts: factors of embeddings, scores, outputs and logits.

Sources: https://github.com/ibm-granite/granite-3.0-language-models and arXiv:2408.13359.
"""

from typing import Any

from moelib.huggingface import blocks, grouped_query, llama
from moelib.huggingface.family import Family
from moelib.huggingface.settings import Settings
from moelib.huggingface.tensor_mapping import Part, Table
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.feed_forward import FeedForward
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
_NAMES = "num_local_experts", "intermediate_size"  # Settings of `blocks.moe`.


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


def _dense(settings: Settings) -> CausalLM.Config:
    return model_of(settings, grouped_query.feed_forward(settings))


def moe_of(settings: Settings, shared: FeedForward.Config | None = None) -> MoELayer.Config:
    """Returns a layer of experts."""
    router = Router.default_config().set(score=Score.SOFTMAX_AFTER_TOP_K)
    return blocks.moe(settings, *_NAMES, router=router, shared_experts=shared)


def shared_of(settings: Settings) -> FeedForward.Config | None:
    """Returns the shared experts."""
    hidden_dim = settings.take("shared_intermediate_size", 0)
    return blocks.feed_forward(hidden_dim) if hidden_dim else None


def _moe(settings: Settings) -> CausalLM.Config:
    settings.expect(position_embedding_type="rope")  # As transformers 4 writes it.
    return model_of(settings, moe_of(settings))


def _moe_shared(settings: Settings) -> CausalLM.Config:
    settings.expect(position_embedding_type="rope")
    return model_of(settings, moe_of(settings, shared_of(settings)))


def moe_settings(cfg: CausalLM.Config) -> dict[str, Any]:
    """Returns the settings that these functions read."""
    return grouped_query.settings_of(cfg, "num_local_experts")


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
    grouped_query.settings_of,
    lambda cfg: IN_LAYER,
    defaults=DEFAULTS,
)
GRANITEMOE = Family(
    "granitemoe",
    "GraniteMoeForCausalLM",
    _moe,
    moe_settings,
    lambda cfg: IN_LAYER,
    defaults=DEFAULTS,
)
GRANITEMOESHARED = Family(
    "granitemoeshared",
    "GraniteMoeSharedForCausalLM",
    _moe_shared,
    moe_settings,
    lambda cfg: IN_LAYER,
    defaults=DEFAULTS,
)
