"""MiniMax-M2: norms over all heads together, a sigmoid router with a bias, no shared experts.

Source: the published config and weights of MiniMaxAI/MiniMax-M2.
"""

from typing import Any

from moelib.huggingface import blocks, deepseek_moe
from moelib.huggingface.family import Family
from moelib.huggingface.mixture import MIXTRAL_IN_LAYER
from moelib.huggingface.settings import Settings
from moelib.huggingface.tensor_mapping import Part, Table
from moelib.layers.moe.router import Score
from moelib.layers.rope import RotaryEmbedding
from moelib.models.causal_lm import CausalLM

IN_LAYER: Table = {
    **MIXTRAL_IN_LAYER,
    "feed_forward/router/bias_balancing/bias": [
        Part("block_sparse_moe.e_score_correction_bias", "e -> e")
    ],
}
_NAMES = "num_local_experts", "intermediate_size"  # Settings of `blocks.moe`.


def _model(settings: Settings) -> CausalLM.Config:
    settings.expect(qk_norm_type="per_layer", use_qk_norm=True, sliding_window=None)
    settings.expect(scoring_func="sigmoid", use_routing_bias=True, shared_intermediate_size=0)
    settings.expect(attn_type_list=[1] * settings.take("num_hidden_layers"))  # 1: full attention.
    # Modules of multi-token prediction, which are not published, and parts that M2 lacks.
    settings.skip("mlp_intermediate_size", "mtp_transformer_layers", "num_mtp_modules")
    settings.skip("shared_moe_mode", "use_mtp")
    deepseek_moe.expect_known_quantization(settings)
    norm = blocks.norm(settings)
    attention = blocks.attention(settings, partial_rotary=True, qk_norm=norm, qk_norm_joint=True)
    rope = blocks.expect(attention.rope, RotaryEmbedding.Config)
    head_dim, rotary_dim = attention.head_dim, settings.take("rotary_dim", None)
    is_published = "partial_rotary_factor" not in blocks.rope_parameters(settings)
    if is_published and rotary_dim not in (None, head_dim):
        rope.rotary_dim = rotary_dim
    settings.expect(rotary_dim=rope.rotary_dim or head_dim)
    router = deepseek_moe.balanced_router(Score.SIGMOID, renormalize=True)
    return blocks.model(settings, attention, blocks.moe(settings, *_NAMES, router=router))


def _settings(cfg: CausalLM.Config) -> dict[str, Any]:
    attention = blocks.layers_of(cfg.decoder)[0].self_attention
    return {
        **blocks.attention_settings(cfg, partial_rotary=True),
        **blocks.moe_settings(cfg, *_NAMES),
        "rotary_dim": attention.rope.rotary_dim or attention.head_dim,
    }


MINIMAX_M2 = Family(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    _model,
    _settings,
    lambda cfg: IN_LAYER,
    defaults={
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e6,
    },
)
