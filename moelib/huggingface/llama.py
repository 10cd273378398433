"""Llama 3 and Qwen3, dense models. Sources: arXiv:2407.21783 and arXiv:2505.09388."""

from moelib.huggingface import blocks, grouped_query
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
    return blocks.model(settings, attention, grouped_query.feed_forward(settings))


def _llama(settings: Settings) -> CausalLM.Config:
    return _model(settings, qk_norm=False)


def _qwen3(settings: Settings) -> CausalLM.Config:
    blocks.expect_full_attention(settings)
    return _model(settings, qk_norm=True)


LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    _llama,
    grouped_query.settings_of,
    lambda cfg: IN_LAYER,
    defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    heads_divide_dim=True,
)
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    _qwen3,
    grouped_query.settings_of,
    lambda cfg: IN_LAYER,
    defaults={
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6,
    },
)
