"""OLMo 2, OLMo 3 and FlexOlmo: norms of outputs instead of inputs, and of all heads together.

Sources: arXiv:2501.00656, arXiv:2512.13961 and arXiv:2507.07024.
"""

from typing import Any

from moelib.huggingface import blocks, grouped_query
from moelib.huggingface.family import Family
from moelib.huggingface.settings import Settings
from moelib.huggingface.tensor_mapping import Part, Table
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.moe.router import Router, Score
from moelib.layers.rope import RotaryEmbedding
from moelib.models.causal_lm import CausalLM

IN_LAYER: Table = {
    "attention_output_norm/scale": [Part("post_attention_layernorm.weight", "d -> d")],
    "feed_forward_output_norm/scale": [Part("post_feedforward_layernorm.weight", "d -> d")],
    **blocks.ATTENTION,
    **blocks.feed_forward_table("feed_forward", "mlp"),  # Dense layers.
    **blocks.MOE,
}
_KINDS = blocks.FULL, blocks.WINDOWED  # Names in `rope_parameters` of OLMo 3.
_NAMES = "num_experts", "intermediate_size"  # Settings of `blocks.moe`.


def _attention(settings: Settings, **fields: Any) -> GroupedQueryAttention.Config:
    norm = blocks.norm(settings)
    return blocks.attention_with_bias(settings, qk_norm=norm, qk_norm_joint=True, **fields)


def _model(settings: Settings, attention: Any, feed_forward: Any) -> CausalLM.Config:
    fields = {"norm": None, "output_norm": blocks.norm(settings)}
    return blocks.model(settings, attention, feed_forward, **fields)


def _olmo2(settings: Settings) -> CausalLM.Config:
    return _model(settings, _attention(settings), grouped_query.feed_forward(settings))


def _ropes(settings: Settings) -> dict[bool, RotaryEmbedding.Config]:
    """Returns the rotary embeddings of layers without a window (False) and with one (True).

    transformers 5 writes one for each kind. In the published files `rope_scaling` is that of layers
    without a window, and the others have none.
    """
    found = settings.take("rope_parameters", None) or {}
    if not found.keys() & {blocks.FULL, blocks.WINDOWED}:
        found = {blocks.FULL: found}
    for name in found:
        settings.lookup("rope_parameters", name, dict.fromkeys(_KINDS))
    outer = ("max_position_embeddings", "rope_scaling", "rope_theta")
    values = {name: settings.take(name) for name in outer if name in settings.values}
    full = blocks.rope(settings.inner({**values, "rope_parameters": found.get(blocks.FULL)}))
    windowed = found.get(blocks.WINDOWED) or {"rope_theta": full.theta}
    values = {name: x for name, x in values.items() if name == outer[0]}
    return {False: full, True: blocks.rope(settings.inner({**values, "rope_parameters": windowed}))}


def _olmo3(settings: Settings) -> CausalLM.Config:
    windows, ropes = blocks.windows(settings, lambda n: (n + 1) % 4 != 0), _ropes(settings)
    attention = _attention(settings, rope=None)
    attentions = [attention.clone(window=x, rope=ropes[x is not None].clone()) for x in windows]
    return _model(settings, attentions, grouped_query.feed_forward(settings))


def _olmo3_settings(cfg: CausalLM.Config) -> dict[str, Any]:
    attentions = [layer.self_attention for layer in blocks.layers_of(cfg.decoder)]
    ropes = {each.window is not None: each.rope for each in reversed(attentions)}
    plain = RotaryEmbedding.default_config().set(theta=attentions[0].rope.theta)
    kinds = [blocks.rope_settings(ropes.get(windowed, plain)) for windowed in (False, True)]
    settings = grouped_query.settings_of(cfg) | blocks.rope_spellings(kinds[0])
    if kinds[1] != {"rope_type": "default", "rope_theta": settings["rope_theta"]}:
        del settings["rope_theta"], settings["rope_scaling"]  # They cannot describe both.
    return {**settings, "rope_parameters": dict(zip(_KINDS, kinds, strict=True))}


def _flex_olmo(settings: Settings) -> CausalLM.Config:
    router = Router.default_config().set(
        score=Score.SOFTMAX_BEFORE_TOP_K, renormalize=settings.take("norm_topk_prob", False)
    )
    return _model(settings, _attention(settings), blocks.moe(settings, *_NAMES, router=router))


OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    _olmo2,
    grouped_query.settings_of,
    lambda cfg: IN_LAYER,
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
)
OLMO3 = Family(
    "olmo3",
    "Olmo3ForCausalLM",
    _olmo3,
    _olmo3_settings,
    lambda cfg: IN_LAYER,
    defaults={
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "sliding_window": 4096,
    },
)
FLEX_OLMO = Family(
    "flex_olmo",
    "FlexOlmoForCausalLM",
    _flex_olmo,
    grouped_query.settings_of,
    lambda cfg: IN_LAYER,
    defaults={
        "max_position_embeddings": 4096,
        "num_experts": 7,
        "num_experts_per_tok": 5,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e5,
    },
)
