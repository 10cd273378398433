"""DBRX: LayerNorm, clipped queries, keys and values, fused tensors, settings in groups.

Source: https://www.databricks.com/blog/introducing-dbrx-new-state-art-open-llm.
"""

from collections.abc import Mapping
from typing import Any

from moelib.huggingface import blocks, grouped_query
from moelib.huggingface.family import Family
from moelib.huggingface.settings import Settings, renamed
from moelib.huggingface.tensor_mapping import Part, Table
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.moe.router import Router, Score
from moelib.layers.norm import LayerNorm
from moelib.models.causal_lm import CausalLM

_NAMES_OF_PARTS = {
    "model.embed_tokens": "transformer.wte",
    "model.layers": "transformer.blocks",
    "model.norm": "transformer.norm_f",
}


def _tensor_name(name: str) -> str:
    for usual, of_dbrx in _NAMES_OF_PARTS.items():
        name = name.replace(usual, of_dbrx)
    return name


def _in_layer(cfg: CausalLM.Config) -> Table:
    """Returns the tensors of a layer; queries, keys and values are one tensor."""
    layer = blocks.layers_of(cfg.decoder)[0]
    attention = blocks.expect(layer.self_attention, GroupedQueryAttention.Config)
    groups = attention.num_kv_heads or attention.num_heads
    keys = groups * (cfg.dim // attention.num_heads)
    qkv, experts = "norm_attn_norm.attn.Wqkv.weight", "ffn.experts.mlp"
    k, v = (cfg.dim, cfg.dim + keys), (cfg.dim + keys, cfg.dim + 2 * keys)
    return {
        "attention_norm/scale": [Part("norm_attn_norm.norm_1.weight", "d -> d")],
        "feed_forward_norm/scale": [Part("norm_attn_norm.norm_2.weight", "d -> d")],
        "self_attention/q": [Part(qkv, "(h k) d -> d h k", rows=(0, cfg.dim))],
        "self_attention/kv": [
            Part(qkv, "(g k) d -> d g k", (None, 0), rows=k),
            Part(qkv, "(g k) d -> d g k", (None, 1), rows=v),
        ],
        "self_attention/output": [Part("norm_attn_norm.attn.out_proj.weight", "d (h k) -> h k d")],
        "feed_forward/router/weight": [Part("ffn.router.layer.weight", "e d -> d e")],
        "feed_forward/experts/up": [
            Part(f"{experts}.w1", "(e f) d -> e d f", (None, 0)),
            Part(f"{experts}.v1", "(e f) d -> e d f", (None, 1)),
        ],
        "feed_forward/experts/down": [Part(f"{experts}.w2", "(e f) d -> e f d")],
    }


# Group of settings, "" for the file itself -> the usual name of each of its settings.
_GROUPS: Mapping[str, Mapping[str, str]] = {
    "": {
        "d_model": "hidden_size",
        "max_seq_len": "max_position_embeddings",
        "n_heads": "num_attention_heads",
        "n_layers": "num_hidden_layers",
    },
    "attn_config": {
        "attn_pdrop": "attention_dropout",
        "clip_qkv": "clip_qkv",
        "kv_n_heads": "num_key_value_heads",
        "rope_theta": "rope_theta",
    },
    "ffn_config": {
        "ffn_hidden_size": "intermediate_size",
        "moe_jitter_eps": "router_jitter_noise",
        "moe_loss_weight": "router_aux_loss_coef",
        "moe_num_experts": "num_experts",
        "moe_top_k": "num_experts_per_tok",
    },
}
_NAMES = "num_experts", "intermediate_size"  # Settings of `blocks.moe`.


def _usual(settings: Settings) -> Settings:
    """Returns the settings by their usual names, without groups."""
    values: dict[str, Any] = {}
    for group, names in _GROUPS.items():
        inside = settings.take(group, None) if group else settings.values
        found = {name: x for name, x in (inside or {}).items() if name not in _GROUPS}
        if group == "ffn_config":
            found.pop("hidden_size", None)  # That of the model, which transformers sets.
        values |= renamed(found, names, settings.source)
    settings.skip(*settings.values)  # Those inside are checked.
    return settings.inner(values)


def _model(settings: Settings) -> CausalLM.Config:
    settings = _usual(settings)
    settings.expect(emb_pdrop=0.0, resid_pdrop=0.0, ffn_act_fn={"name": "silu"})
    settings.expect(tie_word_embeddings=False)
    power = settings.take("moe_normalize_expert_weights", 1.0)
    if power is not None:
        settings.expect(moe_normalize_expert_weights=1.0)
    router = Router.default_config().set(
        score=Score.SOFTMAX_BEFORE_TOP_K, renormalize=power is not None
    )
    attention = blocks.attention(settings, qkv_clip=settings.take("clip_qkv", None))
    moe = blocks.moe(settings, *_NAMES, router=router)
    norm = LayerNorm.default_config().set(bias=False)
    return blocks.model(settings, attention, moe, norm=norm)


def _settings(cfg: CausalLM.Config) -> dict[str, Any]:
    layer = cfg.decoder.block[0]
    if layer.self_attention.qkv_clip is None:
        raise ValueError("DBRX cannot run without clip_qkv in transformers.")
    usual = grouped_query.settings_of(cfg)
    groups = {
        group: {name: usual[each] for name, each in names.items() if each in usual}
        for group, names in _GROUPS.items()
    }
    normalized = 1.0 if layer.feed_forward.router.renormalize else None
    groups["ffn_config"]["moe_normalize_expert_weights"] = normalized
    kept = {name: usual[name] for name in ("vocab_size", "rope_parameters", "tie_word_embeddings")}
    return {**groups.pop(""), **groups, **kept}


DBRX = Family(
    "dbrx",
    "DbrxForCausalLM",
    _model,
    _settings,
    _in_layer,
    tensor_name=_tensor_name,
    defaults={
        "hidden_size": 2048,
        "intermediate_size": 3584,
        "max_position_embeddings": 2048,
        "num_attention_heads": 16,
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 24,
        "num_key_value_heads": 1,
    },
)
