"""Hunyuan, dense and with experts: norms of each head's rotated queries and keys.

Sources: arXiv:2411.02265 and https://github.com/Tencent-Hunyuan/Hunyuan-A13B.
"""

from typing import Any

from moelib.core.config_types import shortened
from moelib.core.errors import UserError
from moelib.huggingface import blocks, grouped_query, llama
from moelib.huggingface.family import Family
from moelib.huggingface.settings import Settings
from moelib.huggingface.tensor_mapping import Part, Table
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.moe.layer import MoELayer
from moelib.layers.moe.router import Router, Score
from moelib.layers.rope import RotaryEmbedding
from moelib.models.causal_lm import CausalLM

IN_LAYER: Table = {
    **llama.IN_LAYER,
    "self_attention/rotated_q_norm/scale": [Part("self_attn.query_layernorm.weight", "d -> d")],
    "self_attention/rotated_k_norm/scale": [Part("self_attn.key_layernorm.weight", "d -> d")],
    **blocks.MOE,
    "feed_forward/router/weight": [Part("mlp.gate.wg.weight", "e d -> d e")],
    **blocks.feed_forward_table("feed_forward/shared_experts", "mlp.shared_mlp"),
}


def _rope(settings: Settings, head_dim: int) -> RotaryEmbedding.Config:
    """Returns the rotary embedding, whose base a fixed `alpha` may stretch (NTK-aware scaling)."""
    found = blocks.rope_parameters(settings)
    if found["rope_type"] != "dynamic" or not found.get("alpha"):
        return blocks.rope(settings)
    if head_dim < 3:
        raise UserError(f"{settings.source}: head_dim={head_dim}; with alpha it must be above 2.")
    stretch = found["alpha"] ** (head_dim / (head_dim - 2))
    return RotaryEmbedding.default_config().set(theta=float(found["rope_theta"] * stretch))


# Settings of published files that transformers does not read, and that change nothing here.
_UNUSED = """
    add_classification_head cla_share_factor class_num dense_list eod_token_id group_limited_greedy
    kv_lora_rank mask_init_id moe_drop_tokens moe_random_routing_dropped_token n_group norm_type
    org_vocab_size pad_id pool_type q_lora_rank qk_nope_head_dim qk_rope_head_dim skip_cls_token
    text_end_id text_start_id topk_group v_head_dim
"""


def _attention(settings: Settings) -> GroupedQueryAttention.Config:
    settings.expect(use_qk_norm=True, use_rotary_pos_emb=True, use_cla=False, use_mla=False)
    settings.expect(mlp_bias=False, moe_layer_num_skipped=0)
    settings.skip(*_UNUSED.split())
    head_dim = settings.take("head_dim")
    settings.expect(attention_head_dim=head_dim)
    rope = _rope(settings, head_dim)
    return blocks.attention_with_bias(settings, rope=rope, rotated_qk_norm=blocks.norm(settings))


# Settings of experts that describe the only kind that transformers has.
_MOE_SETTINGS = "moe_intermediate_size", "norm_topk_prob", "num_shared_expert", "use_mixed_mlp_moe"


def _dense(settings: Settings) -> CausalLM.Config:
    settings.skip(*_MOE_SETTINGS, "moe_topk", "num_experts")  # Of experts, which it lacks.
    feed_forward = grouped_query.feed_forward(settings)
    return blocks.model(settings, _attention(settings), feed_forward)


def _moe(settings: Settings) -> CausalLM.Config:
    hidden_dim, num = settings.take("intermediate_size"), settings.take("moe_topk")
    for name, wanted in zip(_MOE_SETTINGS, (hidden_dim, True, 1, True), strict=True):
        _expect_in_each_layer(settings, name, wanted)
    moe = MoELayer.default_config().set(
        num_experts=settings.take("num_experts"),
        hidden_dim=hidden_dim,
        router=Router.default_config().set(score=Score.SOFTMAX_BEFORE_TOP_K, renormalize=True),
        shared_experts=blocks.feed_forward(hidden_dim),
    )
    each = num if isinstance(num, list) else [num] * settings.take("num_hidden_layers")
    settings.expect(num_hidden_layers=len(each), routed_scaling_factor=1.0)
    parts = [moe.clone(num_experts_per_token=number) for number in each]
    return blocks.model(settings, _attention(settings), parts)


def _expect_in_each_layer(settings: Settings, name: str, wanted: Any) -> None:
    """Raises UserError unless a setting, or each number of its list, is absent or as wanted."""
    found = settings.values.get(name, wanted)
    settings.skip(name)
    if any(x != wanted for x in (found if isinstance(found, list) else [found])):
        raise UserError(
            f"{settings.source}: {name}={shortened(found)}; moelib supports only {wanted!r}."
        )


def _moe_settings(cfg: CausalLM.Config) -> dict[str, Any]:
    each = [layer.num_experts_per_token for layer in blocks.moe_layers_of(cfg)]
    topk = each[0] if len({*each}) == 1 else each
    return {**grouped_query.settings_of(cfg), "moe_topk": topk}


_DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
HUNYUAN_DENSE = Family(
    "hunyuan_v1_dense",
    "HunYuanDenseV1ForCausalLM",
    _dense,
    grouped_query.settings_of,
    lambda cfg: IN_LAYER,
    defaults=_DEFAULTS,
)
HUNYUAN_MOE = Family(
    "hunyuan_v1_moe",
    "HunYuanMoEV1ForCausalLM",
    _moe,
    _moe_settings,
    lambda cfg: IN_LAYER,
    defaults={**_DEFAULTS, "moe_topk": 1, "num_experts": 1},
)
