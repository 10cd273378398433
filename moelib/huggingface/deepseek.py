"""DeepSeek-V2 and V3: latent attention, groups of experts, shared experts, dense first layers.

Sources: arXiv:2405.04434 and arXiv:2412.19437.
"""

import math
from typing import Any

from moelib.huggingface import blocks
from moelib.huggingface.family import Family
from moelib.huggingface.settings import Settings
from moelib.huggingface.tensor_mapping import Part, Table
from moelib.layers.attention.latent import LatentAttention
from moelib.layers.feed_forward import FeedForward
from moelib.layers.moe.balance import BiasBalancing
from moelib.layers.moe.router import GroupScore, Router, Score
from moelib.layers.norm import RMSNorm
from moelib.layers.rope import yarn_mscale
from moelib.models.causal_lm import CausalLM
from moelib.models.multi_token_prediction import MultiTokenModule, MultiTokenPrediction

_LATENT_EPS = 1e-6  # Epsilon of the latents' norms, which does not follow rms_norm_eps.


def _in_layer(cfg: CausalLM.Config) -> Table:
    """Returns the tensors of a layer; the down projection of keys and values is one tensor."""
    layer = blocks.layers_of(cfg.decoder)[0]
    attention = blocks.expect(layer.self_attention, LatentAttention.Config)
    nope, latent = attention.nope_head_dim, attention.kv_lora_rank
    both = latent + attention.rope_head_dim
    kv_down = "self_attn.kv_a_proj_with_mqa.weight"
    return {
        **blocks.NORMS,
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
        **blocks.feed_forward_table("feed_forward", "mlp"),  # Dense layers.
        **blocks.MOE,
        "feed_forward/router/bias_balancing/bias": [
            Part("mlp.gate.e_score_correction_bias", "e -> e")
        ],
        **blocks.feed_forward_table("feed_forward/shared_experts", "mlp.shared_experts"),
        # Modules of multi-token prediction.
        "embedding_norm/scale": [Part("enorm.weight", "d -> d")],
        "hidden_norm/scale": [Part("hnorm.weight", "d -> d")],
        "projection/weight": [Part("eh_proj.weight", "d e -> e d")],
        "output_norm/scale": [Part("shared_head.norm.weight", "d -> d")],
    }


_ATTENTION = {  # Our field -> its setting.
    "num_heads": "num_attention_heads",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "nope_head_dim": "qk_nope_head_dim",
    "rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
_MAX_DEPTHS = 8  # Modules of multi-token prediction; published models have one.
_MOE = "n_routed_experts", "moe_intermediate_size"  # Settings of `blocks.moe`.


def _attention(settings: Settings) -> LatentAttention.Config:
    settings.expect(attention_bias=False)
    settings.skip("num_key_value_heads", "head_dim", "qk_head_dim")
    fields = {field: settings.take(name) for field, name in _ATTENTION.items()}
    parameters, name = blocks.rope_parameters(settings), "mscale_all_dim"
    scales = parameters["rope_type"] != "default" and parameters.get(name)
    rope = blocks.rope(settings, also_read=(name,) if scales else ())
    return LatentAttention.default_config().set(
        **fields,
        rope=rope,
        norm=RMSNorm.default_config().set(eps=_LATENT_EPS),
        score_factor=yarn_mscale(rope.factor, scales) ** 2 if scales else 1.0,
    )


_FP8 = {  # DeepSeek-V3 is published so; its weights are dequantized when they are read.
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}


def _model(settings: Settings, router: Router.Config) -> CausalLM.Config:
    settings.expect(moe_layer_freq=1, mlp_bias=False)
    if quantization := settings.take("quantization_config", None):
        neutral = ("modules_to_not_convert", "scale_fmt")  # Dtypes of tensors tell both.
        found = {name: x for name, x in quantization.items() if name not in neutral}
        if _FP8 | found != _FP8:
            settings.expect(quantization_config=_FP8)
    moe = blocks.moe(settings, *_MOE, router=router)
    if num_shared := settings.take("n_shared_experts", None):
        moe.shared_experts = blocks.feed_forward(num_shared * moe.hidden_dim)
    num_dense = settings.take("first_k_dense_replace")
    dense = blocks.feed_forward(settings.take("intermediate_size"))
    parts = [dense if n < num_dense else moe for n in range(settings.take("num_hidden_layers"))]
    return blocks.model(settings, _attention(settings), parts)


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
    return _model(settings, router)


def _v3(settings: Settings) -> CausalLM.Config:
    settings.expect(scoring_func="sigmoid", topk_method="noaux_tc", rope_interleave=True)
    settings.skip("num_mtp_layers")
    num_depths = settings.take("num_nextn_predict_layers", 0)
    router = Router.default_config().set(
        score=Score.SIGMOID,
        renormalize=settings.take("norm_topk_prob"),
        scaling_factor=float(settings.take("routed_scaling_factor")),
        bias_balancing=BiasBalancing.default_config().set(rate=0.0),  # Trained already.
    )
    groups = settings.take("n_group"), settings.take("topk_group")
    if groups[0] not in (None, 1):
        router.set(num_groups=groups[0], num_groups_per_token=groups[1])
        router.set(group_score=GroupScore.SUM_OF_TOP_2)
    cfg = _model(settings, router)
    if num_depths:
        layer = blocks.layers_of(cfg.decoder)[-1]
        module = MultiTokenModule.default_config().set(norm=cfg.output_norm, layer=layer)
        further = MultiTokenPrediction.default_config().set(num_depths=num_depths, module=module)
        cfg.multi_token_prediction = further
    return cfg


def _further_layers(cfg: CausalLM.Config) -> list[str]:
    """Returns the names of the layers that hold the modules of multi-token prediction."""
    further, first = cfg.multi_token_prediction, cfg.decoder.num_layers
    return [f"model.layers.{first + i}" for i in range(further.num_depths if further else 0)]


def _unused_layers(cfg: CausalLM.Config) -> tuple[str, ...]:
    """Returns a pattern of the layers that predict further tokens, which transformers ignores."""
    numbers = range(cfg.decoder.num_layers, cfg.decoder.num_layers + _MAX_DEPTHS)
    unused = rf"model\.layers\.({'|'.join(map(str, numbers))})\..*"
    return () if cfg.multi_token_prediction else (unused,)


def _copies(cfg: CausalLM.Config) -> dict[str, str]:
    table = "model.embed_tokens.weight"
    parts = {"embed_tokens": table, "shared_head.head": "lm_head.weight" if cfg.lm_head else table}
    return {
        f"{layer}.{copy}.weight": name
        for layer in _further_layers(cfg)
        for copy, name in parts.items()
    }


def _mscale_all_dim(score_factor: float, factor: float) -> float:
    """Returns the mscale_all_dim from which `_attention` computes exactly `score_factor`."""
    exact = (math.sqrt(score_factor) - 1) / (0.1 * math.log(factor))
    digits = (round(exact, n) for n in range(18))
    return next(m for m in digits if yarn_mscale(factor, m) ** 2 == score_factor)


def _settings(cfg: CausalLM.Config) -> dict[str, Any]:
    layers = blocks.layers_of(cfg.decoder)
    kinds = [layer.feed_forward for layer in layers]
    dense = [kind for kind in kinds if isinstance(kind, FeedForward.Config)]
    moe = blocks.moe_of(cfg)
    if moe.shared_experts is None:
        raise ValueError("MoE layers of DeepSeek have shared experts in transformers.")
    attention = blocks.expect(layers[0].self_attention, LatentAttention.Config)
    rope = blocks.rope_settings(attention.rope)
    if attention.score_factor != 1.0 and "mscale_all_dim" not in rope:
        rope["mscale_all_dim"] = _mscale_all_dim(attention.score_factor, rope["factor"])
    return {
        **blocks.model_settings(cfg),
        **{name: getattr(attention, field) for field, name in _ATTENTION.items()},
        **blocks.moe_settings(cfg, *_MOE),
        "num_key_value_heads": attention.num_heads,
        **blocks.rope_spellings(rope),
        "first_k_dense_replace": len(dense),
        "intermediate_size": dense[0].hidden_dim if dense else 4 * cfg.dim,  # Or unused.
        "n_shared_experts": moe.shared_experts.hidden_dim // moe.hidden_dim,
        "routed_scaling_factor": moe.router.scaling_factor,
        "n_group": moe.router.num_groups or 1,
        "topk_group": moe.router.num_groups_per_token or 1,
    }


def _v2_settings(cfg: CausalLM.Config) -> dict[str, Any]:
    grouped = blocks.moe_of(cfg).router.num_groups is not None
    return {**_settings(cfg), "topk_method": "group_limited_greedy" if grouped else "greedy"}


def _v3_settings(cfg: CausalLM.Config) -> dict[str, Any]:
    return {
        **_settings(cfg),
        "norm_topk_prob": blocks.moe_of(cfg).router.renormalize,
        "num_nextn_predict_layers": len(_further_layers(cfg)),
    }


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
    _in_layer,
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
    _v3_settings,
    _in_layer,
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
    ignored=_unused_layers,
    copies=_copies,
)
