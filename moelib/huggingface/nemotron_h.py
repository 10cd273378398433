"""Nemotron-H and Nemotron 3: layers of one part, Mamba-2, attention, an MLP or experts.

Sources: arXiv:2504.03624, arXiv:2512.20848, and the published configs and weights of
nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.
"""

from collections.abc import Callable, Mapping
from typing import Any

from moelib.huggingface import blocks, deepseek_moe, granite_hybrid
from moelib.huggingface.family import Family
from moelib.huggingface.settings import Settings
from moelib.huggingface.tensor_mapping import Part, Table
from moelib.layers.activation import Activation
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.base import BaseLayer
from moelib.layers.feed_forward import FeedForward
from moelib.layers.mixers.mamba2 import Mamba2
from moelib.layers.moe.layer import MoELayer
from moelib.layers.transformer import TransformerLayer
from moelib.models.causal_lm import CausalLM

_KINDS = {"M": blocks.LINEAR, "*": blocks.FULL, "-": "mlp", "E": "moe"}  # Letter -> its name.
_EARLIER_NAMES = {"mamba": "M", "attention": "*"}
_LETTERS: dict[type, str] = {
    Mamba2: "M",
    GroupedQueryAttention: "*",
    FeedForward: "-",
    MoELayer: "E",
}
_USUAL = {  # The family's name of a setting -> that of other families.
    "chunk_size": "mamba_chunk_size",
    "conv_kernel": "mamba_d_conv",
    "layer_norm_epsilon": "rms_norm_eps",
    "layers_block_type": "layer_types",
    "mamba_num_heads": "mamba_n_heads",
    "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
    "n_groups": "mamba_n_groups",
    "ssm_state_size": "mamba_d_state",
    "use_conv_bias": "mamba_conv_bias",
}
_DEFAULTS = {
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_state": 128,
    "mamba_head_dim": 64,
    "mamba_n_groups": 8,
    "mamba_n_heads": 128,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 7688,
    "n_group": 1,
    "n_routed_experts": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 1.0,
    "shared_expert_intermediate_size": 7688,
    "topk_group": 1,
    "vocab_size": 131072,
}


# -- Tensors -------------------------------------------------------------------------------------


_MLP = "up_proj", "down_proj"
_IN_LAYER: Table = {
    "attention_norm/scale": [Part("norm.weight", "d -> d")],
    "feed_forward_norm/scale": [Part("norm.weight", "d -> d")],
    **{
        path: [part._replace(tensor=part.tensor.replace("self_attn", "mixer")) for part in parts]
        for path, parts in blocks.ATTENTION.items()
    },
    **blocks.feed_forward_table("feed_forward", "mixer", _MLP),
    **blocks.feed_forward_table("feed_forward/experts", "mixer.experts.{e}", _MLP),
    **blocks.feed_forward_table("feed_forward/shared_experts", "mixer.shared_experts", _MLP),
    "feed_forward/router/weight": [Part("mixer.gate.weight", "e d -> d e")],
    "feed_forward/router/bias_balancing/bias": [
        Part("mixer.gate.e_score_correction_bias", "e -> e")
    ],
    "feed_forward/latent_down/weight": [Part("mixer.fc1_latent_proj.weight", "r d -> d r")],
    "feed_forward/latent_up/weight": [Part("mixer.fc2_latent_proj.weight", "d r -> r d")],
}
_IN_MODEL = {"model.embed_tokens.": "backbone.embeddings.", "model.norm.": "backbone.norm_f."}


def _in_layer(layer: TransformerLayer.Config) -> Table:
    mixer = layer.self_attention
    is_mamba = isinstance(mixer, Mamba2.Config)
    return {**_IN_LAYER, **granite_hybrid.mamba_table(mixer, "mixer")} if is_mamba else _IN_LAYER


def _tensor_name(name: str) -> str:
    for ours, theirs in {**_IN_MODEL, "model.": "backbone."}.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


# -- Settings ------------------------------------------------------------------------------------


def _kinds(settings: Settings) -> str:
    """Returns the letter of each layer."""
    pattern = settings.take("hybrid_override_pattern", "ME*-")
    letters = {name: letter for letter, name in _KINDS.items()} | _EARLIER_NAMES
    names = settings.take("layer_types", None)
    if names is None:
        names = [settings.lookup("hybrid_override_pattern", kind, _KINDS) for kind in pattern]
    found = "".join(settings.lookup("layers_block_type", name, letters) for name in names)
    settings.expect(hybrid_override_pattern=found, num_hidden_layers=len(found))
    settings.values["num_hidden_layers"] = len(found)
    return found


def _mamba(settings: Settings) -> Mamba2.Config:
    return granite_hybrid.mamba_of(settings, settings.take("mamba_head_dim"))


def _attention(settings: Settings) -> GroupedQueryAttention.Config:
    settings.expect(attention_head_dim=settings.take("head_dim"))
    return blocks.attention(settings, rope=None)


def _feed_forward(hidden_dim: int) -> FeedForward.Config:
    return blocks.feed_forward(hidden_dim).set(activation=Activation.SQUARED_RELU)


def _mlp(settings: Settings) -> FeedForward.Config:
    return _feed_forward(settings.take("intermediate_size"))


def _moe(settings: Settings) -> MoELayer.Config:
    settings.expect(n_shared_experts=1)  # Of the size of all shared experts.
    cfg = blocks.moe(
        settings,
        *deepseek_moe.NAMES.of_moe,
        router=deepseek_moe.sigmoid_router(settings),
        latent_dim=settings.take("moe_latent_size", None),
        shared_experts=_feed_forward(settings.take("shared_expert_intermediate_size")),
    )
    cfg.experts.activation = Activation.SQUARED_RELU
    return cfg


def _parts(
    settings: Settings, kinds: str, makers: Mapping[str, Callable[[Settings], BaseLayer.Config]]
) -> list[BaseLayer.Config | None]:
    """Returns each layer's part, of the kinds that these functions make; None without one."""
    made = {kind: make(settings) for kind, make in makers.items() if kind in kinds}
    return [made.get(kind) for kind in kinds]


def _model(settings: Settings) -> CausalLM.Config:
    settings.rename(_USUAL)
    kinds = _kinds(settings)
    settings.expect(mlp_hidden_act="relu2", mamba_hidden_act="silu", sliding_window=None)
    settings.expect(attention_bias=False, mlp_bias=False, use_bias=False, hidden_dropout=0.0)
    settings.expect(tie_word_embeddings=False, norm_eps=settings.take("rms_norm_eps"))
    for name in ("partial_rotary_factor", "rope_parameters", "rope_scaling", "rope_theta"):
        settings.take(name, None)  # No layer has positions.
    settings.skip(  # Of dtypes, initial values and the computation.
        *("mamba_expand", "expand", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap"),
        *("num_logits_to_keep", "rescale_prenorm_residual", "residual_in_fp32"),
        *("time_step_floor", "time_step_max", "time_step_min", "use_mamba_kernels"),
        # Of the modules that predict further tokens, which are not read.
        *("mtp_hybrid_override_pattern", "mtp_layers_block_type", "num_nextn_predict_layers"),
    )
    mixers = _parts(settings, kinds, {"M": _mamba, "*": _attention})
    feed_forwards = _parts(settings, kinds, {"-": _mlp, "E": _moe})
    settings.skip(*_DEFAULTS, "moe_latent_size", "n_shared_experts")  # Of parts of no layer.
    return blocks.model(settings, mixers, feed_forwards)


def _settings(cfg: CausalLM.Config) -> dict[str, Any]:
    layers = blocks.layers_of(cfg.decoder)
    both = [part for layer in layers for part in (layer.self_attention, layer.feed_forward)]
    parts = [part for part in both if part is not None]
    if len(parts) > len(layers):
        raise ValueError("A layer of Nemotron-H has one part in transformers.")
    kinds = "".join(_LETTERS[part.klass] for part in parts)
    of_kind: dict[str, Any] = dict(zip(kinds, parts, strict=True))
    found = {
        **blocks.model_settings(cfg),
        "hybrid_override_pattern": kinds,
        "layer_types": [_KINDS[kind] for kind in kinds],
        "mlp_hidden_act": "relu2",
        # transformers raises smaller steps to it when it reads a text, though not when it adds a
        # token; the published code and moelib do not.
        "time_step_min": 1e-30,
    }
    del found["hidden_act"]
    if mamba := of_kind.get("M"):
        found |= {**granite_hybrid.mamba_settings(mamba), "mamba_head_dim": mamba.head_dim}
    if attention := of_kind.get("*"):
        found |= {
            "num_attention_heads": attention.num_heads,
            "num_key_value_heads": attention.num_kv_heads or attention.num_heads,
            "head_dim": attention.head_dim or cfg.dim // attention.num_heads,
        }
    if mlp := of_kind.get("-"):
        found["intermediate_size"] = mlp.hidden_dim
    if moe := of_kind.get("E"):
        found |= {
            **deepseek_moe.moe_settings(cfg),
            "moe_latent_size": moe.latent_dim,
            "n_shared_experts": 1,
            "shared_expert_intermediate_size": moe.shared_experts.hidden_dim,
        }
    names = {usual: name for name, usual in _USUAL.items()}
    return {names.get(name, name): value for name, value in found.items()}


NEMOTRON_H = Family(
    "nemotron_h",
    "NemotronHForCausalLM",
    _model,
    _settings,
    lambda cfg: _in_layer,
    defaults=_DEFAULTS,
    ignored=lambda cfg: (r"mtp\..*",),
    tensor_name=_tensor_name,
)
