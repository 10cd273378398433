"""DeepSeek-V2 and V3, and their latent attention in Kimi K2, GLM-4.7-Flash and Mistral Small 4.

Sources: arXiv:2405.04434, arXiv:2412.19437, arXiv:2507.20534 and arXiv:2508.06471; for Mistral
Small 4, its published config.
"""

import math
from collections.abc import Sequence
from typing import Any

from moelib.core.errors import UserError
from moelib.huggingface import blocks, deepseek_moe
from moelib.huggingface.family import Family
from moelib.huggingface.settings import Settings
from moelib.huggingface.tensor_mapping import Part, Table
from moelib.layers.attention.latent import LatentAttention
from moelib.layers.attention.temperature import AttentionTemperature
from moelib.layers.moe.router import Router, Score
from moelib.layers.norm import RMSNorm
from moelib.layers.rope import RotaryEmbedding, yarn_mscale
from moelib.models.causal_lm import CausalLM

LATENT_EPS = 1e-6  # Epsilon of the latents' norms, which does not follow rms_norm_eps.


def latent_in_layer(attention: LatentAttention.Config) -> Table:
    """Returns the tensors of attention; the down projection of keys and values is one tensor."""
    nope, latent = attention.nope_head_dim, attention.kv_lora_rank
    both = latent + attention.rope_head_dim
    kv_down = "self_attn.kv_a_proj_with_mqa.weight"
    return {
        "self_attention/q": [
            Part("self_attn.q_proj.weight", "(h k) d -> d h k", pairs_from=nope),
        ],
        "self_attention/q_down": [Part("self_attn.q_a_proj.weight", "r d -> d r")],
        "self_attention/q_norm/scale": [Part("self_attn.q_a_layernorm.weight", "r -> r")],
        "self_attention/q_up": [
            Part("self_attn.q_b_proj.weight", "(h k) r -> r h k", pairs_from=nope),
        ],
        "self_attention/kv_down": [Part(kv_down, "r d -> d r", rows=(0, latent))],
        "self_attention/k_rope": [Part(kv_down, "k d -> d k", rows=(latent, both), pairs_from=0)],
        "self_attention/kv_norm/scale": [Part("self_attn.kv_a_layernorm.weight", "r -> r")],
        "self_attention/kv_up": [Part("self_attn.kv_b_proj.weight", "(h k) r -> r h k")],
        "self_attention/output": [Part("self_attn.o_proj.weight", "d (h k) -> h k d")],
    }


def in_layer(cfg: CausalLM.Config) -> Table:
    """Returns the tensors of a layer with experts, or of a dense one."""
    attention = blocks.layers_of(cfg.decoder)[0].self_attention
    latent = latent_in_layer(blocks.expect(attention, LatentAttention.Config))
    return {**blocks.NORMS, **latent, **deepseek_moe.IN_LAYER}


ATTENTION = {  # Our field -> its setting.
    "num_heads": "num_attention_heads",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "nope_head_dim": "qk_nope_head_dim",
    "rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}


def latent_attention(
    settings: Settings, also_read: Sequence[str] = (), head_dim: int | None = None
) -> LatentAttention.Config:
    """Returns the attention; `also_read` and `head_dim` are as in `blocks.rope`."""
    settings.expect(attention_bias=False)
    settings.skip("num_key_value_heads", "head_dim", "qk_head_dim")
    fields = {field: settings.take(name) for field, name in ATTENTION.items()}
    parameters, name = blocks.rope_parameters(settings), "mscale_all_dim"
    scales = parameters["rope_type"] != "default" and parameters.get(name)
    also_read = (*also_read, name) if scales else also_read
    rope = blocks.rope(settings, also_read, head_dim=head_dim)
    return LatentAttention.default_config().set(
        **fields,
        rope=rope,
        norm=RMSNorm.default_config().set(eps=LATENT_EPS),
        score_factor=yarn_mscale(rope.factor, scales) ** 2 if scales else 1.0,
    )


_V2_GROUPS = {"greedy": False, "group_limited_greedy": True}


def _v2(settings: Settings) -> CausalLM.Config:
    settings.expect(scoring_func="softmax", norm_topk_prob=False)
    router = Router.default_config().set(
        score=Score.SOFTMAX_BEFORE_TOP_K,
        scaling_factor=float(settings.take("routed_scaling_factor")),
    )
    groups = settings.take("n_group", None), settings.take("topk_group", None)
    if settings.choose("topk_method", _V2_GROUPS):
        router.set(num_groups=groups[0], num_groups_per_token=groups[1])
    dense = deepseek_moe.first_dense(settings)
    parts = deepseek_moe.feed_forwards(settings, router, dense)
    return blocks.model(settings, latent_attention(settings), parts)


def _v3(settings: Settings) -> CausalLM.Config:
    settings.expect(rope_interleave=True)
    dense = deepseek_moe.first_dense(settings)
    return deepseek_moe.multi_token_model(settings, latent_attention(settings), dense)


def _glm4_moe_lite(settings: Settings) -> CausalLM.Config:
    settings.expect(rope_interleave=True)
    dense = deepseek_moe.listed_dense(settings, num_dense=1)
    return deepseek_moe.multi_token_model(settings, latent_attention(settings), dense)


# Parameters of Mistral's rotary embedding that its queries' temperature reads.
_BETA, _CONTEXT = "llama_4_scaling_beta", "original_max_position_embeddings"
_MAX_CONTEXT, _MISTRAL_CONTEXT = "max_position_embeddings", 8192


def _mistral4(settings: Settings) -> CausalLM.Config:
    settings.expect(rope_interleave=True)
    parameters, also_read = blocks.rope_parameters(settings), (_BETA, _CONTEXT, _MAX_CONTEXT)
    head_dim = settings.take("qk_nope_head_dim") + settings.take("qk_rope_head_dim")
    attention = latent_attention(settings, also_read, head_dim)
    rope = blocks.expect(attention.rope, RotaryEmbedding.Config)
    if rope.rotary_dim not in (None, attention.rope_head_dim):
        raise UserError(
            f"{settings.source}: partial_rotary_factor rotates {rope.rotary_dim} of {head_dim} "
            f"entries; moelib supports only qk_rope_head_dim={attention.rope_head_dim}."
        )
    rope.rotary_dim = None  # All of the entries that have positions.
    if parameters.get(_BETA) is None:
        raise UserError(f"{settings.source}: {_BETA} of rope_parameters is missing.")
    if parameters[_BETA]:
        context = parameters.get(_CONTEXT) or settings.take(_MAX_CONTEXT)
        temperature = AttentionTemperature.default_config()
        attention.temperature = temperature.set(beta=float(parameters[_BETA]), context=context)
    router = Router.default_config().set(
        score=Score.SOFTMAX_BEFORE_TOP_K,
        renormalize=settings.take("norm_topk_prob"),
        scaling_factor=float(settings.take("routed_scaling_factor")),
    )
    router, dense = deepseek_moe.with_groups(settings, router), deepseek_moe.first_dense(settings)
    parts = deepseek_moe.feed_forwards(settings, router, dense)
    return blocks.model(settings, attention, parts)


def _mscale_all_dim(score_factor: float, factor: float) -> float:
    """Returns the mscale_all_dim from which `_attention` computes exactly `score_factor`."""
    exact = (math.sqrt(score_factor) - 1) / (0.1 * math.log(factor))
    digits = (round(exact, n) for n in range(18))
    return next(m for m in digits if yarn_mscale(factor, m) ** 2 == score_factor)


def latent_settings(cfg: CausalLM.Config) -> dict[str, Any]:
    """Returns the settings of a model that `latent_attention` and `deepseek_moe` read."""
    layer = blocks.layers_of(cfg.decoder)[0]
    attention = blocks.expect(layer.self_attention, LatentAttention.Config)
    rope = blocks.rope_settings(attention.rope)
    if attention.score_factor != 1.0 and "mscale_all_dim" not in rope:
        rope["mscale_all_dim"] = _mscale_all_dim(attention.score_factor, rope["factor"])
    return {
        **blocks.model_settings(cfg),
        **{name: getattr(attention, field) for field, name in ATTENTION.items()},
        **deepseek_moe.moe_settings(cfg),
        "num_key_value_heads": attention.num_heads,
        **blocks.rope_spellings(rope),
    }


def _v2_settings(cfg: CausalLM.Config) -> dict[str, Any]:
    grouped = blocks.moe_of(cfg).router.num_groups is not None
    return {**latent_settings(cfg), "topk_method": "group_limited_greedy" if grouped else "greedy"}


def _mistral4_settings(cfg: CausalLM.Config) -> dict[str, Any]:
    layer = blocks.layers_of(cfg.decoder)[0]
    attention = blocks.expect(layer.self_attention, LatentAttention.Config)
    temperature, rotated = attention.temperature, attention.rope_head_dim
    settings = latent_settings(cfg)
    rope = {_BETA: 0.0, _CONTEXT: _MISTRAL_CONTEXT, **settings["rope_parameters"]}
    rope["partial_rotary_factor"] = rotated / (attention.nope_head_dim + rotated)
    if rope["rope_type"] == "default":
        raise ValueError("Mistral 4 of transformers has no rotary embedding of type 'default'.")
    if temperature is not None:
        rope |= {_BETA: temperature.beta, _CONTEXT: temperature.context}
    return {**settings, **blocks.rope_spellings(rope)}


_DEFAULTS = {  # Shared by both versions.
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "v_head_dim": 128,
}
V2 = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    _v2,
    _v2_settings,
    in_layer,
    defaults={
        **_DEFAULTS,
        "first_k_dense_replace": 0,
        "max_position_embeddings": 2048,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
    },
    heads_divide_dim=True,
)
V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    _v3,
    latent_settings,
    in_layer,
    defaults={
        **_DEFAULTS,
        "first_k_dense_replace": 3,
        "max_position_embeddings": 4096,
        "n_group": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
    },
    ignored=deepseek_moe.unused_layers,
    copies=deepseek_moe.copies,
)
KIMI_K2 = V3._replace(model_type="kimi_k2", written_as="deepseek_v3")
GLM4_MOE_LITE = V3._replace(
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    model=_glm4_moe_lite,
    defaults={
        "kv_lora_rank": 512,
        "max_position_embeddings": 202752,
        "n_group": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 1.8,
        "topk_group": 1,
        "v_head_dim": 256,
    },
)
MISTRAL4 = Family(
    "mistral4",
    "Mistral4ForCausalLM",
    _mistral4,
    _mistral4_settings,
    lambda cfg: {**in_layer(cfg), **blocks.FUSED_EXPERTS},
    defaults={
        "first_k_dense_replace": 0,
        "kv_lora_rank": 256,
        "max_position_embeddings": 1048576,
        "n_group": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "q_lora_rank": 1024,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 128.0,
            _CONTEXT: _MISTRAL_CONTEXT,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            _BETA: 0.1,
        },
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "v_head_dim": 128,
    },
)
