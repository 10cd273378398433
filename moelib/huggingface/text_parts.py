"""Text parts of Qwen3-VL-MoE, Qwen3.5 and ERNIE-4.5-VL, written as models of text.

Positions of text are equal on all axes of their rotary embeddings, which then are the plain ones.
"""

from typing import Any

from moelib.huggingface import blocks, deepseek_moe, ernie
from moelib.huggingface.mixture import QWEN3_MOE, QWEN_IN_LAYER
from moelib.huggingface.qwen_next import QWEN3_5_MOE
from moelib.huggingface.settings import Settings
from moelib.huggingface.tensor_mapping import Part, Table
from moelib.models.causal_lm import CausalLM

_UP, _DOWN = "feed_forward/experts/up", "feed_forward/experts/down"
QWEN_VL_IN_LAYER: Table = {  # Published with the other view; transformers 5 writes the first.
    **QWEN_IN_LAYER,
    _UP: [blocks.FUSED_EXPERTS[_UP][0]._replace(other_view="e d (n f) -> e n d f")],
    _DOWN: [blocks.FUSED_EXPERTS[_DOWN][0]._replace(other_view="e f d -> e f d")],
}
ERNIE_VL_IN_LAYER: Table = {  # The second row of biases is that of the experts of images.
    **ernie.IN_LAYER,
    "feed_forward/router/weight": [Part("mlp.gate.weight", "d e -> d e")],
    "feed_forward/router/bias_balancing/bias": [
        Part(ernie.BIAS, "1 e -> e", rows=(0, 1), num_rows=2)
    ],
}


def _text(settings: Settings, *, tied: bool, **changes: Any) -> Settings:
    """Returns the settings of the text part, with changes to them.

    Args:
        settings: Settings of config.json.
        tied: Default of `tie_word_embeddings`.
        **changes: Settings of the text part that its class fixes.
    """
    settings.skip("vision_config", *(x for x in settings.values if x.endswith("_token_id")))
    tied = settings.take("tie_word_embeddings", tied)
    text = settings.nested("text_config", tie_word_embeddings=tied, **changes)
    for name in text.values.keys() & {"rope_parameters", "rope_scaling"}:
        parameters = text.take(name) or {}
        plain = {key: x for key, x in parameters.items() if not key.startswith("mrope_")}
        text.values[name] = plain
    settings.finish()
    return text


def _qwen3_vl_moe(settings: Settings) -> CausalLM.Config:
    return QWEN3_MOE.model(_text(settings, tied=False, norm_topk_prob=True))


def _qwen3_5_moe(settings: Settings) -> CausalLM.Config:
    return QWEN3_5_MOE.model(_text(settings, tied=False))


def _ernie4_5_vl_moe(settings: Settings) -> CausalLM.Config:
    text = _text(settings, tied=True)
    sizes = text.values.get("moe_intermediate_size")  # Of experts of text, and of images.
    if isinstance(sizes, list) and sizes:
        text.values["moe_intermediate_size"] = sizes[0]
    return ernie.model(text, deepseek_moe.listed_dense(text, num_dense=1))


def _in_language_model(name: str) -> str:
    return name.replace("model.", "model.language_model.", 1)


def _unread_of_ernie(cfg: CausalLM.Config) -> tuple[str, ...]:
    """Returns patterns of the tensors of images."""
    num_experts = blocks.moe_of(cfg).num_experts
    numbers = "|".join(map(str, range(num_experts, 2 * num_experts)))
    in_layer = rf"model\.layers\.\d+\.mlp\.(experts\.({numbers})\..*|gate\.weight_1)"
    return in_layer, r"(model\.)?(vision_model|resampler_model)\..*", r".*mtp.*"


QWEN3_VL_MOE = QWEN3_MOE._replace(
    model_type="qwen3_vl_moe",
    model=_qwen3_vl_moe,
    in_layer=lambda cfg: QWEN_VL_IN_LAYER,
    defaults={**QWEN3_MOE.defaults, "num_key_value_heads": 16, "rope_theta": 500000.0},
    ignored=lambda cfg: (r"model\.visual\..*",),
    tensor_name=_in_language_model,
    written_as="qwen3_moe",
)
QWEN3_5_MOE_WITH_IMAGES = QWEN3_5_MOE._replace(
    model_type="qwen3_5_moe",
    model=_qwen3_5_moe,
    ignored=lambda cfg: (r"model\.visual\..*", r"mtp\..*"),
    tensor_name=_in_language_model,
    written_as=QWEN3_5_MOE.model_type,
)
ERNIE4_5_VL_MOE = ernie.ERNIE4_5_MOE._replace(
    model_type="ernie4_5_vl_moe",
    model=_ernie4_5_vl_moe,
    in_layer=lambda cfg: ERNIE_VL_IN_LAYER,
    ignored=_unread_of_ernie,
    written_as="ernie4_5_moe",
)
