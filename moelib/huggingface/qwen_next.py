"""Qwen3-Next and Qwen3.5 (text): Gated DeltaNet, and attention with a gate, by turns.

Sources: the published configs and weights of Qwen/Qwen3-Next-80B-A3B-Instruct and
Qwen/Qwen3.5-35B-A3B; arXiv:2412.06464.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from moelib.huggingface import blocks, mixture
from moelib.huggingface.family import Family
from moelib.huggingface.settings import Settings
from moelib.huggingface.tensor_mapping import Part, Table
from moelib.layers.mixers.gated_delta_net import GatedDeltaNet
from moelib.layers.moe.router import Router, Score
from moelib.layers.transformer import TransformerLayer
from moelib.models.causal_lm import CausalLM

_DELTA = {  # Our field -> its setting.
    "num_value_heads": "linear_num_value_heads",
    "num_key_heads": "linear_num_key_heads",
    "key_head_dim": "linear_key_head_dim",
    "value_head_dim": "linear_value_head_dim",
    "conv_width": "linear_conv_kernel_dim",
}
_MROPE = "mrope_section", "mrope_interleaved"  # Equal to plain positions for text.


# -- Tensors -------------------------------------------------------------------------------------


def _in_layer(layer: TransformerLayer.Config, *, joint: bool) -> Table:
    """Returns the tensors of a layer; in Qwen3-Next, those of a key head are joint."""
    if isinstance(layer.self_attention, GatedDeltaNet.Config):
        return {**mixture.QWEN_IN_LAYER, **_delta_net(layer.self_attention, joint=joint)}
    dim, heads = layer.self_attention.head_dim, layer.self_attention.num_heads
    query = Part("self_attn.q_proj.weight", "(h k) d -> d h k", row_groups=heads)
    return {
        **mixture.QWEN_IN_LAYER,
        "self_attention/q": [query._replace(rows=(0, dim))],
        "self_attention/gate": [query._replace(rows=(dim, 2 * dim))],
    }


def _delta_net(delta: GatedDeltaNet.Config, *, joint: bool) -> Table:
    groups = delta.num_key_heads or delta.num_value_heads
    per_group = delta.num_value_heads // groups
    sizes = [delta.key_head_dim, delta.key_head_dim, per_group * delta.value_head_dim]

    def parts(name: str, view: str, sizes: Sequence[int], row_groups: int = 1) -> list[Part]:
        stops = itertools.accumulate(sizes)
        rows = [(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]
        return [Part(f"linear_attn.{name}.weight", view, (), each, row_groups) for each in rows]

    of_head, of_scalar = "(h k) d -> d h k", "h d -> d h"
    of_all = [groups * size for size in sizes]
    if joint:
        q, k, v, gate = parts("in_proj_qkvz", of_head, [*sizes, sizes[-1]], groups)
        beta, decay = parts("in_proj_ba", of_scalar, [per_group, per_group], groups)
    else:
        q, k, v = parts("in_proj_qkv", of_head, of_all)
        gate = Part("linear_attn.in_proj_z.weight", of_head)
        beta, decay = (Part(f"linear_attn.in_proj_{x}.weight", of_scalar) for x in "ba")
    q_conv, k_conv, v_conv = parts("conv1d", "(h k) 1 w -> h k w", of_all)
    found = {
        "qk": [q._replace(index=(None, 0)), k._replace(index=(None, 1))],
        "v": [v],
        "gate": [gate],
        "beta": [beta],
        "decay": [decay],
        "qk_conv/weight": [q_conv._replace(index=(0,)), k_conv._replace(index=(1,))],
        "v_conv/weight": [v_conv],
        "log_decay_rate": [Part("linear_attn.A_log", "h -> h")],
        "decay_bias": [Part("linear_attn.dt_bias", "h -> h")],
        "norm/scale": [Part("linear_attn.norm.weight", "k -> k")],
        "output": [Part("linear_attn.out_proj.weight", "d (h k) -> h k d")],
    }
    return {f"self_attention/{path}": each for path, each in found.items()}


# -- Settings ------------------------------------------------------------------------------------


def _model(settings: Settings, feed_forward: Any) -> CausalLM.Config:
    settings.expect(attention_bias=False)
    norm = blocks.norm(settings)
    zero_centered = norm.clone(zero_centered=True)
    head_dim = settings.take("head_dim")
    attention = blocks.attention(
        settings,
        qk_norm=zero_centered,
        output_gate=True,
        rope=blocks.rope(settings, _MROPE, head_dim=head_dim),
    )
    fields = {field: settings.take(name) for field, name in _DELTA.items()}
    delta = GatedDeltaNet.default_config().set(norm=norm, **fields)
    total, every = settings.take("num_hidden_layers"), settings.take("full_attention_interval", 4)
    kinds = settings.take("layer_types", None) or [
        blocks.LINEAR if (n + 1) % every else blocks.FULL for n in range(total)
    ]
    settings.expect(num_hidden_layers=len(kinds))
    known = {blocks.LINEAR: delta, blocks.FULL: attention}
    mixers = [settings.lookup("layer_types", kind, known) for kind in kinds]
    return blocks.model(settings, mixers, feed_forward, norm=zero_centered)


def _settings(cfg: CausalLM.Config) -> dict[str, Any]:
    mixers = [layer.self_attention for layer in blocks.layers_of(cfg.decoder)]
    delta = next(mixer for mixer in mixers if isinstance(mixer, GatedDeltaNet.Config))
    return {
        **blocks.attention_settings(cfg, partial_rotary=True),
        **{name: getattr(delta, field) for field, name in _DELTA.items()},
        "linear_num_key_heads": delta.num_key_heads or delta.num_value_heads,
        "layer_types": [
            blocks.LINEAR if isinstance(mixer, GatedDeltaNet.Config) else blocks.FULL
            for mixer in mixers
        ],
    }


def _shared(settings: Settings) -> dict[str, Any]:
    """Returns the fields of MoE layers with a shared expert and its gate."""
    hidden_dim = settings.take("shared_expert_intermediate_size")
    return {"shared_experts": blocks.feed_forward(hidden_dim), "shared_gate": True}


def _shared_settings(cfg: CausalLM.Config) -> dict[str, Any]:
    shared = blocks.moe_of(cfg).shared_experts
    if shared is None:
        raise ValueError("MoE layers of Qwen3-Next have shared experts in transformers.")
    return {"shared_expert_intermediate_size": shared.hidden_dim}


def _qwen3_next(settings: Settings) -> CausalLM.Config:
    settings.expect(use_sliding_window=False)
    return _model(settings, mixture.qwen_feed_forwards(settings, **_shared(settings)))


def _qwen3_next_settings(cfg: CausalLM.Config) -> dict[str, Any]:
    return {**mixture.qwen_settings(cfg), **_settings(cfg), **_shared_settings(cfg)}


_MOE = "num_experts", "moe_intermediate_size"  # Settings of `blocks.moe`.


def _qwen3_5_moe(settings: Settings) -> CausalLM.Config:
    router = Router.default_config().set(score=Score.SOFTMAX_BEFORE_TOP_K, renormalize=True)
    return _model(settings, blocks.moe(settings, *_MOE, router=router, **_shared(settings)))


def _qwen3_5_moe_settings(cfg: CausalLM.Config) -> dict[str, Any]:
    moe = {**blocks.moe_settings(cfg, *_MOE), **blocks.balance_settings(cfg)}
    return {**_settings(cfg), **moe, **_shared_settings(cfg)}


_DEFAULTS = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
}
QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    _qwen3_next,
    _qwen3_next_settings,
    lambda cfg: functools.partial(_in_layer, joint=True),
    defaults={**_DEFAULTS, "decoder_sparse_step": 1, "norm_topk_prob": True},
    ignored=lambda cfg: (r"mtp\..*",),
)
QWEN3_5_MOE = Family(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    _qwen3_5_moe,
    _qwen3_5_moe_settings,
    lambda cfg: functools.partial(_in_layer, joint=False),
    defaults=_DEFAULTS,
    ignored=lambda cfg: (r"mtp\..*",),
)
