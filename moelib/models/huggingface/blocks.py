"""What families share: attention, rotary embeddings, feed-forward layers, stacks, their tensors."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from moelib.layers.activation import Activation
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.feed_forward import FeedForward
from moelib.layers.moe.layer import MoELayer
from moelib.layers.norm import RMSNorm
from moelib.layers.rope import (
    LinearRotaryEmbedding,
    Llama3RotaryEmbedding,
    RotaryEmbedding,
    YarnRotaryEmbedding,
)
from moelib.layers.transformer import BaseStack, ScanStack, TransformerLayer
from moelib.models.causal_lm import CausalLM
from moelib.models.huggingface.places import Part, Table
from moelib.models.huggingface.settings import Settings, one_of

T = TypeVar("T")


def expect(cfg: Any, kind: type[T]) -> T:
    """Returns a config. Raises TypeError unless it is of that kind."""
    if not isinstance(cfg, kind):
        raise TypeError(f"{cfg!r} is no {kind.__qualname__}.")
    return cfg


IN_MODEL: Table = {
    "embedding/weight": [Part("model.embed_tokens.weight", "v d -> v d")],
    "output_norm/scale": [Part("model.norm.weight", "d -> d")],
    "lm_head/weight": [Part("lm_head.weight", "v d -> d v")],
}

NORMS: Table = {
    "attention_norm/scale": [Part("input_layernorm.weight", "d -> d")],
    "feed_forward_norm/scale": [Part("post_attention_layernorm.weight", "d -> d")],
}

ATTENTION: Table = {
    "self_attention/q": [Part("self_attn.q_proj.weight", "(h k) d -> d h k")],
    "self_attention/kv": [
        Part("self_attn.k_proj.weight", "(g k) d -> d g k", (None, 0)),
        Part("self_attn.v_proj.weight", "(g k) d -> d g k", (None, 1)),
    ],
    "self_attention/output": [Part("self_attn.o_proj.weight", "d (h k) -> h k d")],
    "self_attention/q_bias": [Part("self_attn.q_proj.bias", "(h k) -> h k")],
    "self_attention/kv_bias": [
        Part("self_attn.k_proj.bias", "(g k) -> g k", (0,)),
        Part("self_attn.v_proj.bias", "(g k) -> g k", (1,)),
    ],
    "self_attention/output_bias": [Part("self_attn.o_proj.bias", "d -> d")],
    "self_attention/q_norm/scale": [Part("self_attn.q_norm.weight", "d -> d")],
    "self_attention/k_norm/scale": [Part("self_attn.k_norm.weight", "d -> d")],
    "self_attention/sinks": [Part("self_attn.sinks", "h -> h")],
}


def feed_forward_table(
    ours: str, theirs: str, names: Sequence[str] = ("gate_proj", "up_proj", "down_proj")
) -> Table:
    """Returns the places of a gated feed-forward layer, or, with "{e}" in `theirs`, of experts."""
    gate, up, down = (f"{theirs}.{name}.weight" for name in names)
    lead = ("e",) if "{e}" in theirs else ()
    return {
        f"{ours}/up": [Part(gate, "f d -> d f", (*lead, 0)), Part(up, "f d -> d f", (*lead, 1))],
        f"{ours}/down": [Part(down, "d f -> f d", lead)],
    }


MOE: Table = {
    "feed_forward/router/weight": [Part("mlp.gate.weight", "e d -> d e")],
    **feed_forward_table("feed_forward/experts", "mlp.experts.{e}"),
}


def moe_of(cfg: CausalLM.Config) -> MoELayer.Config:
    """Returns the first MoE layer's. Raises StopIteration if there is none."""
    parts = (layer.feed_forward for layer in layers_of(cfg.decoder))
    return next(part for part in parts if isinstance(part, MoELayer.Config))


# -- Rotary embeddings ---------------------------------------------------------------------------

# For each kind, our class, and the names of our fields for those of theirs.
_ROPES: Mapping[str, tuple[type[RotaryEmbedding], Mapping[str, str]]] = {
    "default": (RotaryEmbedding, {}),
    "linear": (LinearRotaryEmbedding, {"factor": "factor"}),
    "llama3": (
        Llama3RotaryEmbedding,
        {
            "factor": "factor",
            "original_max_position_embeddings": "original_context",
            "low_freq_factor": "low_freq_factor",
            "high_freq_factor": "high_freq_factor",
        },
    ),
    "yarn": (
        YarnRotaryEmbedding,
        {
            "factor": "factor",
            "original_max_position_embeddings": "original_context",
            "beta_fast": "beta_fast",
            "beta_slow": "beta_slow",
            "truncate": "truncate",
            "attention_factor": "attention_factor",
            "mscale": "mscale",
            "mscale_all_dim": "mscale_all_dim",
        },
    ),
}


def rope_parameters(settings: Settings) -> dict[str, Any]:
    """Returns `rope_parameters`, which older files call `rope_scaling`; empty if there are none.

    Raises:
        ValueError: If both are there, and differ.
    """
    names = ("rope_parameters", "rope_scaling")
    given = [found for name in names if (found := settings.take(name, None))]
    for found in given:
        if not isinstance(found, dict):
            raise ValueError(f"{settings.place}: {' or '.join(names)} is {found!r}, no settings.")
    if len(given) == 2 and given[0] != given[1]:
        raise ValueError(f"{settings.place}: {' and '.join(names)} differ; leave one of them out.")
    return dict(given[0]) if given else {}


def rope(settings: Settings) -> RotaryEmbedding.Config:
    """Returns the rotary embedding of `rope_parameters`, or of `rope_theta` and `rope_scaling`.

    Raises:
        ValueError: If it is of a kind, or has a setting, that moelib has not.
    """
    theta = settings.take("rope_theta", None)
    found = rope_parameters(settings)
    kind = found.pop("rope_type", found.pop("type", "default"))
    found.pop("type", None)
    theta = found.pop("rope_theta", theta)
    if theta is None:
        raise ValueError(f"{settings.place}: rope_theta is missing.")
    cls, names = one_of(settings.place, "rope_type", kind, _ROPES)
    if unknown := sorted(found.keys() - names.keys()):
        raise ValueError(
            f"{settings.place}: settings of the rotary embedding {kind!r} that moelib does not "
            f"know: {', '.join(f'{name}={found[name]!r}' for name in unknown)}."
        )
    if cls is YarnRotaryEmbedding and not (found.get("mscale") and found.get("mscale_all_dim")):
        found = {n: x for n, x in found.items() if n not in ("mscale", "mscale_all_dim")}
    fields = {names[name]: value for name, value in found.items() if value is not None}
    for name in ("theta", "factor", "beta_fast", "beta_slow", "low_freq_factor"):
        if name in fields:
            fields[name] = float(fields[name])
    return cls.default_config().set(theta=float(theta), **fields)


def rope_settings(cfg: Any) -> dict[str, Any]:
    """Returns `rope_parameters` of a rotary embedding."""
    cfg = expect(cfg, RotaryEmbedding.Config)
    kinds = {cls: (kind, names) for kind, (cls, names) in _ROPES.items()}
    kind, names = kinds[cfg.klass]
    fields = {theirs: getattr(cfg, ours) for theirs, ours in names.items()}
    known = {name: value for name, value in fields.items() if value is not None}
    if not known.get("mscale_all_dim"):
        known = {n: value for n, value in known.items() if n not in ("mscale", "mscale_all_dim")}
    return {"rope_type": kind, "rope_theta": cfg.theta, **known}


# -- Layers --------------------------------------------------------------------------------------


def norm(settings: Settings) -> RMSNorm.Config:
    """Returns the norm of `rms_norm_eps`."""
    return RMSNorm.default_config().set(eps=float(settings.take("rms_norm_eps")))


def attention(settings: Settings, **fields: Any) -> GroupedQueryAttention.Config:
    """Returns attention by the settings that all families but DeepSeek share."""
    heads = settings.take("num_attention_heads")
    cfg = GroupedQueryAttention.default_config().set(
        num_heads=heads,
        num_kv_heads=settings.take("num_key_value_heads", heads),
        head_dim=settings.take("head_dim", None) or settings.take("hidden_size") // heads,
        rope=rope(settings),
    )
    return cfg.set(**fields)


def attention_with_bias(settings: Settings, **fields: Any) -> GroupedQueryAttention.Config:
    """Returns attention whose matmuls all have a bias if `attention_bias` says so."""
    bias = settings.take("attention_bias", False)
    return attention(settings, qkv_bias=bias, output_bias=bias, **fields)


def attention_settings(cfg: Any, dim: int) -> dict[str, Any]:
    """Returns the settings that `attention` reads."""
    cfg = expect(cfg, GroupedQueryAttention.Config)
    return {
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads or cfg.num_heads,
        "head_dim": cfg.head_dim or dim // cfg.num_heads,
        "rope_parameters": rope_settings(cfg.rope),
    }


def expect_full_attention(settings: Settings) -> None:
    """Raises ValueError if a layer of Qwen has a sliding window."""
    settings.expect(use_sliding_window=False)
    settings.pass_over(["sliding_window", "max_window_layers"])  # Of no layer then.
    for kind in settings.take("layer_types", None) or []:
        if kind != "full_attention":
            raise ValueError(f"{settings.place}: layer_types has {kind!r}; moelib has full ones.")


def feed_forward(hidden_dim: int) -> FeedForward.Config:
    """Returns a dense layer."""
    return FeedForward.default_config().set(hidden_dim=hidden_dim, activation=Activation.SWIGLU)


def model(settings: Settings, layers: Sequence[TransformerLayer.Config]) -> CausalLM.Config:
    """Returns the model of those layers.

    Raises:
        ValueError: If there is a setting that nobody asked for.
    """
    settings.expect(hidden_act="silu", attention_dropout=0.0, num_hidden_layers=len(layers))
    tied = settings.take("tie_word_embeddings", False)
    cfg = CausalLM.default_config().set(
        vocab_size=settings.take("vocab_size"),
        dim=settings.take("hidden_size"),
        decoder=stack(layers),
        output_norm=layers[0].norm.clone(),
    )
    if tied:
        cfg.lm_head = None
    settings.finish()
    return cfg


def model_settings(cfg: CausalLM.Config) -> dict[str, Any]:
    """Returns the settings that `model` and `norm` read."""
    return {
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.dim,
        "num_hidden_layers": cfg.decoder.num_layers,
        "rms_norm_eps": cfg.output_norm.eps,
        "tie_word_embeddings": cfg.lm_head is None,
        "hidden_act": "silu",
    }


def stack(layers: Sequence[TransformerLayer.Config]) -> ScanStack.Config:
    """Returns the shortest stack of these layers: first ones, and a block that repeats."""
    total, texts = len(layers), [layer.debug_string() for layer in layers]
    cuts = [
        (first, size)
        for first in range(total)
        for size in range(1, total - first + 1)
        if (total - first) % size == 0
        and texts[first:] == texts[first : first + size] * ((total - first) // size)
    ]
    first, size = min(cuts, key=lambda cut: (sum(cut), cut[0]))
    return ScanStack.default_config().set(
        num_layers=total,
        first_layers=[layer.clone() for layer in layers[:first]],
        block=[layer.clone() for layer in layers[first : first + size]],
    )


def layers_of(cfg: Any) -> list[TransformerLayer.Config]:
    """Returns the config of every layer of a stack."""
    cfg = expect(cfg, BaseStack.Config)
    repeats = (cfg.num_layers - len(cfg.first_layers)) // len(cfg.block)
    layers = [*cfg.first_layers, *cfg.block * repeats]
    return [expect(layer, TransformerLayer.Config) for layer in layers]
