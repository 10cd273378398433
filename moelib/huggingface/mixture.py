"""Mixtral, OLMoE, Qwen2-MoE and Qwen3-MoE: grouped-query attention, softmax over all experts.

Sources: arXiv:2401.04088, arXiv:2409.02060, arXiv:2407.10671 and arXiv:2505.09388.
"""

import functools
from typing import Any

from moelib.huggingface import blocks
from moelib.huggingface.family import Family
from moelib.huggingface.settings import Settings
from moelib.huggingface.tensor_mapping import Part, Table
from moelib.layers.base import BaseLayer
from moelib.layers.feed_forward import FeedForward
from moelib.layers.moe.layer import MoELayer
from moelib.layers.moe.router import Router, Score
from moelib.models.causal_lm import CausalLM

_AROUND: Table = {**blocks.NORMS, **blocks.ATTENTION}

QWEN_IN_LAYER: Table = {
    **_AROUND,
    **blocks.feed_forward_table("feed_forward", "mlp"),  # Dense layers.
    **blocks.MOE,
    **blocks.feed_forward_table("feed_forward/shared_experts", "mlp.shared_expert"),
    "feed_forward/shared_gate": [Part("mlp.shared_expert_gate.weight", "n d -> d n")],
}

MIXTRAL_IN_LAYER: Table = {
    **_AROUND,
    "feed_forward/router/weight": [Part("block_sparse_moe.gate.weight", "e d -> d e")],
    **blocks.feed_forward_table(
        "feed_forward/experts", "block_sparse_moe.experts.{e}", ("w1", "w3", "w2")
    ),
}

# A sigmoid gate of zeros halves the shared experts' output, which is written twice as large.
UNGATED_IN_LAYER: Table = {
    **{name: parts for name, parts in QWEN_IN_LAYER.items() if name != "feed_forward/shared_gate"},
    "feed_forward/shared_experts/down": [
        part._replace(factor=0.5) for part in QWEN_IN_LAYER["feed_forward/shared_experts/down"]
    ],
}


_MIXTRAL_NAMES = "num_local_experts", "intermediate_size"  # Settings of `blocks.moe`.
_OLMOE_NAMES = "num_experts", "intermediate_size"
_QWEN_NAMES = "num_experts", "moe_intermediate_size"


def _router(renormalize: bool) -> Router.Config:
    return Router.default_config().set(score=Score.SOFTMAX_BEFORE_TOP_K, renormalize=renormalize)


def _mixtral(settings: Settings) -> CausalLM.Config:
    settings.expect(sliding_window=None, attention_bias=False)
    moe = blocks.moe(settings, *_MIXTRAL_NAMES, router=_router(renormalize=True))
    return blocks.model(settings, blocks.attention(settings), moe)


def _mixtral_settings(cfg: CausalLM.Config) -> dict[str, Any]:
    return {
        **blocks.attention_settings(cfg),
        **blocks.moe_settings(cfg, *_MIXTRAL_NAMES),
        **blocks.balance_settings(cfg),
        "sliding_window": None,
    }


def _olmoe(settings: Settings) -> CausalLM.Config:
    attention = blocks.attention_with_bias(
        settings,
        qk_norm=blocks.norm(settings),
        qk_norm_joint=True,
        qkv_clip=settings.take("clip_qkv", None),
    )
    router = _router(settings.take("norm_topk_prob", False))
    return blocks.model(settings, attention, blocks.moe(settings, *_OLMOE_NAMES, router=router))


def _olmoe_settings(cfg: CausalLM.Config) -> dict[str, Any]:
    layer = cfg.decoder.block[0]
    settings = {
        **blocks.attention_settings(cfg),
        **blocks.moe_settings(cfg, *_OLMOE_NAMES),
        **blocks.balance_settings(cfg),
        "attention_bias": layer.self_attention.qkv_bias,
        "clip_qkv": layer.self_attention.qkv_clip,
        "norm_topk_prob": layer.feed_forward.router.renormalize,
    }
    settings.pop("head_dim")  # transformers fixes it to hidden_size / num_attention_heads.
    return settings


def qwen_feed_forwards(settings: Settings, **fields: Any) -> list[BaseLayer.Config]:
    """Returns each layer's part, dense according to `mlp_only_layers`, `decoder_sparse_step`.

    The fields are those of the MoE layers.
    """
    num_experts, hidden_dim = _QWEN_NAMES
    if num_experts not in settings.values and "num_local_experts" in settings.values:
        num_experts = "num_local_experts"  # The name in transformers 5.
    settings.expect(num_local_experts=settings.take(num_experts))
    router = _router(settings.take("norm_topk_prob", False))
    sparse = blocks.moe(settings, num_experts, hidden_dim, router=router, **fields)
    dense_layers = settings.take("mlp_only_layers", None) or []
    every = settings.take("decoder_sparse_step")
    dense = blocks.feed_forward(settings.take("intermediate_size"))
    return [
        dense if n in dense_layers or (n + 1) % every else sparse
        for n in range(settings.take("num_hidden_layers"))
    ]


def qwen_settings(cfg: CausalLM.Config) -> dict[str, Any]:
    """Returns the settings that Qwen2-MoE, Qwen3-MoE and Qwen3-Next share."""
    kinds = [layer.feed_forward for layer in blocks.layers_of(cfg.decoder)]
    dense = [n for n, kind in enumerate(kinds) if isinstance(kind, FeedForward.Config)]
    hidden_dims = {kinds[n].hidden_dim for n in dense} or {4 * cfg.dim}  # Or unused.
    return {
        **blocks.attention_settings(cfg),
        **blocks.moe_settings(cfg, *_QWEN_NAMES),
        **blocks.balance_settings(cfg),
        "norm_topk_prob": blocks.moe_of(cfg).router.renormalize,
        "intermediate_size": min(hidden_dims),
        "mlp_only_layers": dense,
        "decoder_sparse_step": 1,
        "use_sliding_window": False,
    }


def _qwen3_moe(settings: Settings) -> CausalLM.Config:
    blocks.expect_full_attention(settings)
    attention = blocks.attention_with_bias(settings, qk_norm=blocks.norm(settings))
    return blocks.model(settings, attention, qwen_feed_forwards(settings))


def _qwen3_moe_settings(cfg: CausalLM.Config) -> dict[str, Any]:
    bias = cfg.decoder.block[0].self_attention.qkv_bias
    return {**qwen_settings(cfg), "attention_bias": bias}


def _qwen2_moe(settings: Settings, *, shared_gate: bool = True) -> CausalLM.Config:
    blocks.expect_full_attention(settings)
    attention = blocks.attention(settings, qkv_bias=settings.take("qkv_bias", True))
    shared = blocks.feed_forward(settings.take("shared_expert_intermediate_size"))
    parts = qwen_feed_forwards(settings, shared_experts=shared, shared_gate=shared_gate)
    return blocks.model(settings, attention, parts)


def _qwen2_moe_settings(cfg: CausalLM.Config) -> dict[str, Any]:
    shared = blocks.moe_of(cfg).shared_experts
    if shared is None:
        raise ValueError("MoE layers of Qwen2-MoE have shared experts in transformers.")
    settings = {
        **qwen_settings(cfg),
        "qkv_bias": blocks.layers_of(cfg.decoder)[0].self_attention.qkv_bias,
        "shared_expert_intermediate_size": shared.hidden_dim,
    }
    # Not declared by the family's class, so only written where it is not the default.
    if settings["head_dim"] == settings["hidden_size"] // settings["num_attention_heads"]:
        del settings["head_dim"]
    return settings


def _zero_gates(cfg: CausalLM.Config) -> dict[str, tuple[int, ...]]:
    return {
        f"model.layers.{n}.mlp.shared_expert_gate.weight": (1, cfg.dim)
        for n, layer in enumerate(blocks.layers_of(cfg.decoder))
        if isinstance(layer.feed_forward, MoELayer.Config)
    }


_QWEN_DEFAULTS = {"decoder_sparse_step": 1, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6}

MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    _mixtral,
    _mixtral_settings,
    lambda cfg: MIXTRAL_IN_LAYER,
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
)
OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM",
    _olmoe,
    _olmoe_settings,
    lambda cfg: QWEN_IN_LAYER,
    defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
)
QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    _qwen2_moe,
    _qwen2_moe_settings,
    lambda cfg: QWEN_IN_LAYER,
    defaults={**_QWEN_DEFAULTS, "num_key_value_heads": 16},
)
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    _qwen3_moe,
    _qwen3_moe_settings,
    lambda cfg: QWEN_IN_LAYER,
    defaults={**_QWEN_DEFAULTS, "num_key_value_heads": 4},
)
QWEN2_MOE_UNGATED = QWEN2_MOE._replace(
    model=functools.partial(_qwen2_moe, shared_gate=False),
    in_layer=lambda cfg: UNGATED_IN_LAYER,
    zeros=_zero_gates,
)
