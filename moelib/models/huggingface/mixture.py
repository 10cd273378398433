"""Mixtral, OLMoE, Qwen2-MoE and Qwen3-MoE: grouped-query attention, softmax over all experts.

Sources: arXiv:2401.04088, arXiv:2409.02060, arXiv:2407.10671 and arXiv:2505.09388.
"""

from typing import Any

from moelib.layers.feed_forward import FeedForward
from moelib.layers.moe.layer import MoELayer
from moelib.layers.moe.router import Router, Score
from moelib.layers.norm import RMSNorm
from moelib.layers.transformer import TransformerLayer
from moelib.models.causal_lm import CausalLM
from moelib.models.huggingface import blocks
from moelib.models.huggingface.family import Family
from moelib.models.huggingface.settings import Settings
from moelib.models.huggingface.tensor_mapping import Part, Table

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


def moe(
    num_experts: int, num_chosen: int, hidden_dim: int, *, renormalize: bool
) -> MoELayer.Config:
    """Returns an MoE layer whose router applies a softmax over all experts."""
    return MoELayer.default_config().set(
        num_experts=num_experts,
        num_experts_per_token=num_chosen,
        hidden_dim=hidden_dim,
        router=Router.default_config().set(
            score=Score.SOFTMAX_BEFORE_TOP_K, renormalize=renormalize
        ),
    )


# MoE settings that are written for a model of dense layers, which use none of them.
_UNUSED = moe(1, 1, 1, renormalize=False).set(shared_experts=blocks.feed_forward(1))


def _without_default_head_dim(settings: dict[str, Any]) -> dict[str, Any]:
    """Removes a head_dim that is the default, since the family's class does not declare one."""
    if settings["head_dim"] == settings["hidden_size"] // settings["num_attention_heads"]:
        del settings["head_dim"]
    return settings


def _mixtral(settings: Settings) -> CausalLM.Config:
    settings.expect(sliding_window=None, attention_bias=False)
    layer = TransformerLayer.default_config().set(
        self_attention=blocks.attention(settings),
        feed_forward=moe(
            settings.take("num_local_experts"),
            settings.take("num_experts_per_tok"),
            settings.take("intermediate_size"),
            renormalize=True,
        ),
        norm=blocks.norm(settings),
    )
    return blocks.model(settings, [layer] * settings.take("num_hidden_layers"))


def _mixtral_settings(cfg: CausalLM.Config) -> dict[str, Any]:
    layer = cfg.decoder.block[0]
    return {
        **blocks.model_settings(cfg),
        **blocks.attention_settings(layer.self_attention, cfg.dim),
        "num_local_experts": layer.feed_forward.num_experts,
        "num_experts_per_tok": layer.feed_forward.num_experts_per_token,
        "intermediate_size": layer.feed_forward.hidden_dim,
        "sliding_window": None,
    }


def _olmoe(settings: Settings) -> CausalLM.Config:
    norm = blocks.norm(settings)
    attention = blocks.attention_with_bias(
        settings,
        qk_norm=norm.clone(),
        qk_norm_joint=True,
        qkv_clip=settings.take("clip_qkv", None),
    )
    layer = TransformerLayer.default_config().set(
        self_attention=attention,
        feed_forward=moe(
            settings.take("num_experts"),
            settings.take("num_experts_per_tok"),
            settings.take("intermediate_size"),
            renormalize=settings.take("norm_topk_prob", False),
        ),
        norm=norm,
    )
    return blocks.model(settings, [layer] * settings.take("num_hidden_layers"))


def _olmoe_settings(cfg: CausalLM.Config) -> dict[str, Any]:
    layer = cfg.decoder.block[0]
    settings = {
        **blocks.model_settings(cfg),
        **blocks.attention_settings(layer.self_attention, cfg.dim),
        "attention_bias": layer.self_attention.qkv_bias,
        "clip_qkv": layer.self_attention.qkv_clip,
        "num_experts": layer.feed_forward.num_experts,
        "num_experts_per_tok": layer.feed_forward.num_experts_per_token,
        "intermediate_size": layer.feed_forward.hidden_dim,
        "norm_topk_prob": layer.feed_forward.router.renormalize,
    }
    settings.pop("head_dim")  # transformers fixes it to hidden_size / num_attention_heads.
    return settings


def _qwen_layers(
    settings: Settings, attention: Any, norm: RMSNorm.Config, sparse: MoELayer.Config
) -> list[TransformerLayer.Config]:
    """Returns the layers, dense according to `mlp_only_layers` and `decoder_sparse_step`."""
    dense_layers = settings.take("mlp_only_layers", None) or []
    every = blocks.positive(settings, "decoder_sparse_step")
    dense = blocks.feed_forward(settings.take("intermediate_size"))
    layer = TransformerLayer.default_config().set(self_attention=attention, norm=norm)
    return [
        layer.clone(feed_forward=dense if n in dense_layers or (n + 1) % every else sparse)
        for n in range(settings.take("num_hidden_layers"))
    ]


def _qwen_settings(cfg: CausalLM.Config) -> dict[str, Any]:
    """Returns the settings that Qwen2-MoE and Qwen3-MoE share."""
    layers = blocks.layers_of(cfg.decoder)
    kinds = [layer.feed_forward for layer in layers]
    dense = [n for n, kind in enumerate(kinds) if isinstance(kind, FeedForward.Config)]
    moe = blocks.moe_of(cfg) or _UNUSED
    hidden_dims = {kinds[n].hidden_dim for n in dense} or {4 * cfg.dim}  # Or unused.
    return {
        **blocks.model_settings(cfg),
        **blocks.attention_settings(layers[0].self_attention, cfg.dim),
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_token,
        "moe_intermediate_size": moe.hidden_dim,
        "norm_topk_prob": moe.router.renormalize,
        "intermediate_size": min(hidden_dims),
        "mlp_only_layers": dense,
        "decoder_sparse_step": 1,
        "use_sliding_window": False,
    }


def _qwen3_moe(settings: Settings) -> CausalLM.Config:
    blocks.expect_full_attention(settings)
    norm = blocks.norm(settings)
    attention = blocks.attention_with_bias(settings, qk_norm=norm.clone())
    sparse = _qwen_moe(settings)
    return blocks.model(settings, _qwen_layers(settings, attention, norm, sparse))


def _qwen_moe(settings: Settings) -> MoELayer.Config:
    num_experts = settings.take("num_local_experts", None)  # Name in transformers 5.
    return moe(
        settings.take("num_experts", *([num_experts] if num_experts else [])),
        settings.take("num_experts_per_tok"),
        settings.take("moe_intermediate_size"),
        renormalize=settings.take("norm_topk_prob", False),
    )


def _qwen3_moe_settings(cfg: CausalLM.Config) -> dict[str, Any]:
    bias = cfg.decoder.block[0].self_attention.qkv_bias
    return {**_qwen_settings(cfg), "attention_bias": bias}


def _qwen2_moe(settings: Settings) -> CausalLM.Config:
    blocks.expect_full_attention(settings)
    attention = blocks.attention(settings, qkv_bias=settings.take("qkv_bias", True))
    sparse = _qwen_moe(settings).set(
        shared_experts=blocks.feed_forward(settings.take("shared_expert_intermediate_size")),
        shared_gate=True,
    )
    return blocks.model(settings, _qwen_layers(settings, attention, blocks.norm(settings), sparse))


def _qwen2_moe_ungated(settings: Settings) -> CausalLM.Config:
    cfg = _qwen2_moe(settings)
    layers = blocks.layers_of(cfg.decoder)
    for layer in layers:
        if isinstance(layer.feed_forward, MoELayer.Config):
            layer.feed_forward.shared_gate = False
    return cfg.set(decoder=blocks.stack(layers))


def _zero_gates(cfg: CausalLM.Config) -> dict[str, tuple[int, ...]]:
    return {
        f"model.layers.{n}.mlp.shared_expert_gate.weight": (1, cfg.dim)
        for n, layer in enumerate(blocks.layers_of(cfg.decoder))
        if isinstance(layer.feed_forward, MoELayer.Config)
    }


def _qwen2_moe_settings(cfg: CausalLM.Config) -> dict[str, Any]:
    shared = (blocks.moe_of(cfg) or _UNUSED).shared_experts
    if shared is None:
        raise ValueError("MoE layers of Qwen2-MoE have shared experts in transformers.")
    settings = {
        **_qwen_settings(cfg),
        "qkv_bias": blocks.layers_of(cfg.decoder)[0].self_attention.qkv_bias,
        "shared_expert_intermediate_size": shared.hidden_dim,
    }
    return _without_default_head_dim(settings)


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
    model=_qwen2_moe_ungated, in_layer=lambda cfg: UNGATED_IN_LAYER, zeros=_zero_gates
)
