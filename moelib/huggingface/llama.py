"""Llama 3 and Qwen3, dense models. Sources: arXiv:2407.21783 and arXiv:2505.09388."""

from typing import Any

from moelib.huggingface import blocks
from moelib.huggingface.family import Family
from moelib.huggingface.settings import Settings
from moelib.huggingface.tensor_mapping import Table
from moelib.models.causal_lm import CausalLM

IN_LAYER: Table = {
    **blocks.NORMS,
    **blocks.ATTENTION,
    **blocks.feed_forward_table("feed_forward", "mlp"),
}


def _model(settings: Settings, *, qk_norm: bool) -> CausalLM.Config:
    norm = blocks.norm(settings) if qk_norm else None
    attention = blocks.attention_with_bias(settings, qk_norm=norm)
    feed_forward = blocks.feed_forward(settings.take("intermediate_size"))
    return blocks.model(settings, attention, feed_forward)


def _settings(cfg: CausalLM.Config) -> dict[str, Any]:
    layer = cfg.decoder.block[0]
    return {
        **blocks.attention_settings(cfg),
        "attention_bias": layer.self_attention.qkv_bias,
        "intermediate_size": layer.feed_forward.hidden_dim,
    }


def _llama(settings: Settings) -> CausalLM.Config:
    settings.expect(mlp_bias=False)
    return _model(settings, qk_norm=False)


def _qwen3(settings: Settings) -> CausalLM.Config:
    blocks.expect_full_attention(settings)
    return _model(settings, qk_norm=True)


LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    _llama,
    _settings,
    lambda cfg: IN_LAYER,
    defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    heads_divide_dim=True,
)
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    _qwen3,
    _settings,
    lambda cfg: IN_LAYER,
    defaults={
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6,
    },
)
