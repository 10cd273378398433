"""Qwen2, Mistral and SmolLM3, dense models with windows or layers without positions.

Sources: arXiv:2407.10671, arXiv:2310.06825 and https://huggingface.co/blog/smollm3.
"""

from collections.abc import Callable

from moelib.core.config_types import shortened
from moelib.core.errors import UserError
from moelib.huggingface import blocks, grouped_query
from moelib.huggingface.family import Family
from moelib.huggingface.llama import IN_LAYER
from moelib.huggingface.settings import Settings
from moelib.models.causal_lm import CausalLM


def _optional_windows(settings: Settings, default: Callable[[int], bool]) -> list[int | None]:
    """Returns the windows of layers, which `use_sliding_window` turns off."""
    used = settings.take("use_sliding_window", False)
    some = used and settings.take("sliding_window") is not None
    windows = blocks.windows(settings, lambda n: some and default(n))
    if any(windows):
        settings.expect(use_sliding_window=True)
    return windows


def _qwen2(settings: Settings) -> CausalLM.Config:
    first = settings.take("max_window_layers")
    windows = _optional_windows(settings, lambda n: n >= first)
    attention = blocks.attention(settings, qkv_bias=True)
    attentions = [attention.clone(window=window) for window in windows]
    return blocks.model(settings, attentions, grouped_query.feed_forward(settings))


def _mistral(settings: Settings) -> CausalLM.Config:
    settings.expect(attention_bias=False)
    attention = blocks.attention(settings, window=settings.take("sliding_window"))
    return blocks.model(settings, attention, grouped_query.feed_forward(settings))


def _smollm3(settings: Settings) -> CausalLM.Config:
    total, interval = settings.take("num_hidden_layers"), settings.take("no_rope_layer_interval", 4)
    ropes = settings.take("no_rope_layers", None)
    ropes = ropes or [int((n + 1) % interval != 0) for n in range(total)]
    if len(ropes) < total:
        raise UserError(
            f"{settings.source}: no_rope_layers={shortened(ropes)}; it must have {total} numbers "
            "or more, one for each layer."
        )
    settings.skip("max_window_layers")  # Unused by this family.
    attention = blocks.attention_with_bias(settings)
    windows = _optional_windows(settings, lambda n: not ropes[n])
    attentions = [
        attention.clone(window=window, rope=attention.rope if rope else None)
        for window, rope in zip(windows, ropes[:total], strict=True)
    ]
    return blocks.model(settings, attentions, grouped_query.feed_forward(settings))


QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    _qwen2,
    grouped_query.settings_of,
    lambda cfg: IN_LAYER,
    defaults={
        "max_position_embeddings": 32768,
        "max_window_layers": 28,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
    },
)
MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    _mistral,
    grouped_query.settings_of,
    lambda cfg: IN_LAYER,
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
    },
)
SMOLLM3 = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    _smollm3,
    grouped_query.settings_of,
    lambda cfg: IN_LAYER,
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 2e6,
        "sliding_window": None,
        "tie_word_embeddings": True,
    },
)
