"""Kimi Linear: Kimi Delta Attention, latent attention without positions, MoE of DeepSeek-V3.

Source: arXiv:2510.26692, and the published config of moonshotai/Kimi-Linear-48B-A3B-Instruct.
"""

from typing import Any

from moelib.huggingface import blocks, deepseek, deepseek_moe
from moelib.huggingface.family import Family
from moelib.huggingface.mixture import MIXTRAL_IN_LAYER
from moelib.huggingface.settings import Settings, check_setting
from moelib.huggingface.tensor_mapping import Part, Table
from moelib.layers.attention.latent import LatentAttention
from moelib.layers.mixers.kimi_delta_attention import KimiDeltaAttention
from moelib.layers.norm import RMSNorm
from moelib.layers.transformer import TransformerLayer
from moelib.models.causal_lm import CausalLM

_NAMES = {  # Setting -> its name in other families.
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
_LINEAR_CONFIG = "linear_attn_config"
_LINEAR = {  # Setting of transformers -> its name in `linear_attn_config`.
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}


# -- Tensors -------------------------------------------------------------------------------------


def _low_rank(path: str, letter: str) -> Table:
    down, up = (f"self_attn.{letter}_{matrix}_proj.weight" for matrix in "ab")
    return {
        f"self_attention/{path}_down": [Part(down, "r d -> d r")],
        f"self_attention/{path}_up": [Part(up, "(h k) r -> r h k")],
    }


_PROJECTION, _CONVOLUTION = "(h k) d -> d h k", "(h k) 1 w -> h k w"
_DELTA_IN_LAYER: Table = {
    "self_attention/qk": [
        Part("self_attn.q_proj.weight", _PROJECTION, (None, 0)),
        Part("self_attn.k_proj.weight", _PROJECTION, (None, 1)),
    ],
    "self_attention/v": [Part("self_attn.v_proj.weight", _PROJECTION)],
    "self_attention/qk_conv/weight": [
        Part("self_attn.q_conv1d.weight", _CONVOLUTION, (0,)),
        Part("self_attn.k_conv1d.weight", _CONVOLUTION, (1,)),
    ],
    "self_attention/v_conv/weight": [Part("self_attn.v_conv1d.weight", _CONVOLUTION)],
    "self_attention/beta": [Part("self_attn.b_proj.weight", "h d -> d h")],
    **_low_rank("decay", "f"),
    **_low_rank("gate", "g"),
    "self_attention/log_decay_rate": [Part("self_attn.A_log", "1 1 h 1 -> h")],
    "self_attention/decay_bias": [Part("self_attn.dt_bias", "(h k) -> h k")],
    "self_attention/norm/scale": [Part("self_attn.o_norm.weight", "k -> k")],
    "self_attention/output": [Part("self_attn.o_proj.weight", "d (h k) -> h k d")],
}


def _in_layer(layer: TransformerLayer.Config) -> Table:
    """Returns the tensors of a layer."""
    attention, moe = layer.self_attention, "block_sparse_moe"
    is_latent = isinstance(attention, LatentAttention.Config)
    return {
        **MIXTRAL_IN_LAYER,
        **(deepseek.latent_in_layer(attention) if is_latent else _DELTA_IN_LAYER),
        **blocks.feed_forward_table("feed_forward", "mlp"),
        **blocks.feed_forward_table("feed_forward/shared_experts", f"{moe}.shared_experts"),
        "feed_forward/router/bias_balancing/bias": [
            Part(f"{moe}.gate.e_score_correction_bias", "e -> e")
        ],
    }


# -- Settings ------------------------------------------------------------------------------------


def _model(settings: Settings) -> CausalLM.Config:
    settings.rename(_NAMES)
    settings.expect(attention_bias=False, mla_use_nope=True, num_nextn_predict_layers=0)
    settings.expect(moe_router_activation_func="sigmoid", use_grouped_topk=True)
    settings.skip("head_dim", "model_max_length", "num_key_value_heads", "qk_head_dim")
    for name in ("rope_parameters", "rope_scaling", "rope_theta"):  # It has no positions.
        settings.take(name, None)
    published = settings.inner(settings.take(_LINEAR_CONFIG, None) or {})
    head_dim, heads, width = (_size(settings, published, *names) for names in _LINEAR.items())
    delta = KimiDeltaAttention.default_config().set(
        num_value_heads=heads,
        key_head_dim=head_dim,
        value_head_dim=head_dim,
        conv_width=width,
        norm=blocks.norm(settings),
    )
    latent = LatentAttention.default_config().set(
        **{field: settings.take(name) for field, name in deepseek.ATTENTION.items()},
        norm=RMSNorm.default_config().set(eps=deepseek.LATENT_EPS),
        rope=None,
    )
    total, full = settings.take("num_hidden_layers"), published.take("full_attn_layers", None)
    is_full = (lambda n: n % 4 == 0 and n > 0) if full is None else (lambda n: n + 1 in full)
    listed = [blocks.FULL if is_full(n) else blocks.LINEAR for n in range(total)]
    kinds = settings.take("layer_types", None) or listed
    settings.expect(num_hidden_layers=len(kinds))
    if full is not None:
        settings.expect(layer_types=listed)
        published.expect(kda_layers=[n for n in range(1, total + 1) if n not in full])
    published.finish()
    known = {blocks.LINEAR: delta, blocks.FULL: latent}
    mixers = [settings.lookup("layer_types", kind, known) for kind in kinds]
    dense = deepseek_moe.listed_dense(settings, settings.take("first_k_dense_replace"))
    return deepseek_moe.sigmoid_model(settings, mixers, dense)


def _size(settings: Settings, published: Settings, name: str, name_there: str) -> int:
    """Returns a size that `linear_attn_config` may have too; raises UserError if they differ."""
    found = published.take(name_there, None)
    if found is None:
        return settings.take(name)
    if name in settings.values:
        settings.expect(**{name: found})
    check_setting(name, found, settings.source)
    return found


def _settings(cfg: CausalLM.Config) -> dict[str, Any]:
    mixers = [layer.self_attention for layer in blocks.layers_of(cfg.decoder)]
    delta = next(mixer for mixer in mixers if isinstance(mixer, KimiDeltaAttention.Config))
    latent = next(mixer for mixer in mixers if isinstance(mixer, LatentAttention.Config))
    full = [n + 1 for n, mixer in enumerate(mixers) if isinstance(mixer, LatentAttention.Config)]
    names = {ours: name for name, ours in _NAMES.items()}
    settings = {
        **blocks.model_settings(cfg),
        **{name: getattr(latent, field) for field, name in deepseek.ATTENTION.items()},
        **deepseek_moe.moe_settings(cfg),
        "num_key_value_heads": latent.num_heads,
        _LINEAR_CONFIG: {
            "full_attn_layers": full,
            "head_dim": delta.key_head_dim,
            "kda_layers": [n for n in range(1, len(mixers) + 1) if n not in full],
            "num_heads": delta.num_value_heads,
            "short_conv_kernel_size": delta.conv_width,
        },
        "mla_use_nope": True,
    }
    return {names.get(name, name): value for name, value in settings.items()}


KIMI_LINEAR = Family(
    "kimi_linear",
    "KimiLinearForCausalLM",
    _model,
    _settings,
    lambda cfg: _in_layer,
    defaults={
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "linear_conv_kernel_dim": 4,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "n_group": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 2.446,
        "topk_group": 1,
        "v_head_dim": 128,
    },
)
