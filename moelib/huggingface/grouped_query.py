"""Settings of models with grouped-query attention: a family writes those that it reads."""

from typing import Any

from moelib.huggingface import blocks
from moelib.huggingface.settings import Settings
from moelib.layers.feed_forward import FeedForward
from moelib.layers.moe.layer import MoELayer
from moelib.models.causal_lm import CausalLM


def feed_forward(settings: Settings) -> FeedForward.Config:
    """Returns a dense feed-forward layer of `intermediate_size`."""
    settings.expect(mlp_bias=False)
    return blocks.feed_forward(settings.take("intermediate_size"))


def settings_of(cfg: CausalLM.Config, num_experts: str = "num_experts") -> dict[str, Any]:
    """Returns the settings of a model whose layers are dense, or all have equal experts.

    Args:
        cfg: Config of the model.
        num_experts: Name of the setting with the number of experts.
    """
    layers, settings = blocks.layers_of(cfg.decoder), blocks.attention_settings(cfg)
    attentions = [layer.self_attention for layer in layers]
    layer, attention = layers[0], attentions[0]
    settings |= {
        **blocks.window_settings(cfg),
        "attention_bias": attention.qkv_bias,
        "attention_multiplier": attention.score_scale or settings["head_dim"] ** -0.5,
        "clip_qkv": attention.qkv_clip,
        "embedding_multiplier": cfg.embedding.scale or 1.0,
        "intermediate_size": layer.feed_forward.hidden_dim,
        "logits_scaling": cfg.logit_divisor or 1.0,
        "no_rope_layers": [int(attention.rope is not None) for attention in attentions],
        "residual_multiplier": layer.residual_scale or 1.0,
        "use_sliding_window": any(attention.window for attention in attentions),
    }
    if not isinstance(layer.feed_forward, MoELayer.Config):
        return settings
    shared = layer.feed_forward.shared_experts
    return {
        **settings,
        **blocks.moe_settings(cfg, num_experts, "intermediate_size"),
        **blocks.balance_settings(cfg),
        "norm_topk_prob": layer.feed_forward.router.renormalize,
        "shared_intermediate_size": shared.hidden_dim if shared else 0,
    }
