"""Parts that families share: attention, rotary embeddings, feed-forward layers and stacks."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from moelib.core.config_types import shortened
from moelib.core.errors import UserError
from moelib.huggingface.settings import Settings, check_setting
from moelib.huggingface.tensor_mapping import Part, Table
from moelib.layers.activation import Activation
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.feed_forward import FeedForward
from moelib.layers.moe.balance import BalanceScope
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

T = TypeVar("T")

logger = logging.getLogger(__name__)


def expect(cfg: Any, kind: type[T]) -> T:
    """Returns a config. Raises TypeError unless it is of the given kind."""
    if not isinstance(cfg, kind):
        raise TypeError(f"expected {kind.__qualname__}, got {cfg!r}")
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
    path: str, prefix: str, names: Sequence[str] = ("gate_proj", "up_proj", "down_proj")
) -> Table:
    """Returns the table of a feed-forward layer, or of experts with "{e}" in `prefix`.

    Args:
        path: Path of the layer's parameters.
        prefix: Prefix of the tensors' names.
        names: Names of the gate, up and down projections, or of the last two without a gate.
    """
    *up, down = (f"{prefix}.{name}.weight" for name in names)
    lead = ("e",) if "{e}" in prefix else ()
    return {
        f"{path}/up": [Part(name, "f d -> d f", (*lead, i)) for i, name in enumerate(up)],
        f"{path}/down": [Part(down, "d f -> f d", lead)],
    }


MOE: Table = {
    "feed_forward/router/weight": [Part("mlp.gate.weight", "e d -> d e")],
    **feed_forward_table("feed_forward/experts", "mlp.experts.{e}"),
}

# All experts in one tensor, gate and up projections one after the other.
FUSED_EXPERTS: Table = {
    "feed_forward/experts/up": [Part("mlp.experts.gate_up_proj", "e (n f) d -> e n d f")],
    "feed_forward/experts/down": [Part("mlp.experts.down_proj", "e d f -> e f d")],
}


# -- Rotary embeddings ---------------------------------------------------------------------------

# rope_type -> our class, and our field for each of its settings.
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
_ORIGINAL_CONTEXT, _PARTIAL = "original_max_position_embeddings", "partial_rotary_factor"


def rope_parameters(settings: Settings) -> dict[str, Any]:
    """Returns the parameters of the rotary embedding, with `rope_type` and `rope_theta`.

    transformers 5 writes `rope_parameters`; earlier versions `rope_scaling`, and `rope_theta` next
    to it. A file may have both.

    Raises:
        UserError: If a parameter is given twice with different values.
    """
    names = ("rope_parameters", "rope_scaling")
    outer = ("rope_theta", _PARTIAL, _ORIGINAL_CONTEXT)
    taken = {name: settings.take(name, None) for name in (*names, *outer)}
    given = {name: x for name, x in taken.items() if x and name in settings.values}
    defaults = {"rope_type": "default", "rope_theta": taken["rope_theta"] or 10000.0}
    defaults |= {_PARTIAL: taken[_PARTIAL]} if taken[_PARTIAL] else {}
    spellings: list[dict[str, Any]] = []
    for inner in [given[name] for name in names if name in given] or [taken[names[0]] or {}]:
        inner = {name: x for name, x in inner.items() if x is not None}
        older = {"rope_type": inner.pop("type")} if "type" in inner else {}
        older |= {name: given[name] for name in outer if name in given}
        spellings += [defaults | older | inner, defaults | inner | older]
    for name in sorted(set().union(*spellings)):
        first, *others = (each.get(name) for each in spellings)
        for value in (first, *others):
            check_setting(name, value, settings.source)
            if value != first:
                raise UserError(
                    f"{settings.source}: {name} of the rotary embedding is {shortened(first)} and "
                    f"{shortened(value)}; give it once, or the same in {', '.join(names)}."
                )
    return spellings[0]


def rope(
    settings: Settings, also_read: Sequence[str] = (), *, head_dim: int | None = None
) -> RotaryEmbedding.Config:
    """Returns the rotary embedding of `rope_parameters`.

    Parameters that its rope_type does not read, and that are not in `also_read`, are ignored with a
    warning, as transformers does.

    Args:
        settings: Settings of config.json.
        also_read: Parameters that other layers read.
        head_dim: Entries of a head of which `partial_rotary_factor` may rotate a part; None for
            families that rotate all entries.

    Raises:
        UserError: If moelib has no rotary embedding of that kind.
    """
    settings.expect(rope_interleaved=False)
    found = rope_parameters(settings)
    kind, theta = found.pop("rope_type"), found.pop("rope_theta")
    part, rotary_dim = found.pop(_PARTIAL, 1.0), None
    if part != 1.0:
        if head_dim is None:
            raise UserError(
                f"{settings.source}: partial_rotary_factor={part}; moelib rotates all entries of a "
                "head of this family."
            )
        rotary_dim = int(head_dim * part)
    cls, names = settings.lookup("rope_type", kind, _ROPES)
    if _ORIGINAL_CONTEXT in names:
        context = settings.take("max_position_embeddings")
        found[_ORIGINAL_CONTEXT] = found.get(_ORIGINAL_CONTEXT) or context
        found["factor"] = found.get("factor") or context / found[_ORIGINAL_CONTEXT]
    if ignored := sorted(found.keys() - names.keys() - set(also_read)):
        logger.warning("%s: rope_type=%r does not use %s.", settings.source, kind, ignored)
    if not (found.get("mscale") and found.get("mscale_all_dim")):
        found = {n: x for n, x in found.items() if n not in ("mscale", "mscale_all_dim")}
    fields = {names[n]: x for n, x in found.items() if n in names}
    for name in ("factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"):
        if name in fields:
            fields[name] = float(fields[name])
    return cls.default_config().set(theta=float(theta), rotary_dim=rotary_dim, **fields)


def rope_settings(cfg: Any, head_dim: int | None = None) -> dict[str, Any]:
    """Returns the parameters of a rotary embedding, with its part of `head_dim` if given."""
    cfg = expect(cfg, RotaryEmbedding.Config)
    kinds = {cls: (kind, names) for kind, (cls, names) in _ROPES.items()}
    kind, names = kinds[cfg.klass]
    fields = {name: getattr(cfg, field) for name, field in names.items()}
    known = {name: value for name, value in fields.items() if value is not None}
    if not known.get("mscale_all_dim"):
        known = {n: value for n, value in known.items() if n not in ("mscale", "mscale_all_dim")}
    if head_dim is not None:
        part = (cfg.rotary_dim or head_dim) / head_dim
        exact = int(part * head_dim) == (cfg.rotary_dim or head_dim)  # transformers rounds down.
        known[_PARTIAL] = part if exact else math.nextafter(part, 1.0)
    return {"rope_type": kind, "rope_theta": cfg.theta, **known}


def rope_spellings(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a rotary embedding for transformers 5 and for earlier versions."""
    outer = ("rope_theta", _PARTIAL)
    scaling = {name: x for name, x in parameters.items() if name not in outer}
    return {
        "rope_parameters": parameters,
        **{name: parameters[name] for name in outer if name in parameters},
        "rope_scaling": None if scaling["rope_type"] == "default" else scaling,
    }


# -- Layers --------------------------------------------------------------------------------------


def norm(settings: Settings) -> RMSNorm.Config:
    """Returns the norm with `rms_norm_eps`."""
    return RMSNorm.default_config().set(eps=float(settings.take("rms_norm_eps")))


def attention(
    settings: Settings, *, partial_rotary: bool = False, **fields: Any
) -> GroupedQueryAttention.Config:
    """Returns attention from the settings that all families but DeepSeek share.

    Args:
        settings: Settings of config.json.
        partial_rotary: Whether `partial_rotary_factor` may rotate a part of each head.
        **fields: Further fields.
    """
    heads, dim = settings.take("num_attention_heads"), settings.take("hidden_size")
    if dim < heads:
        raise UserError(
            f"{settings.source}: num_attention_heads={heads} is above hidden_size={dim}."
        )
    head_dim = settings.take("head_dim", None) or dim // heads
    cfg = GroupedQueryAttention.default_config().set(
        num_heads=heads,
        num_kv_heads=settings.take("num_key_value_heads", None) or heads,
        head_dim=head_dim,
    )
    if "rope" not in fields:
        fields["rope"] = rope(settings, head_dim=head_dim if partial_rotary else None)
    return cfg.set(**fields)


def attention_with_bias(settings: Settings, **fields: Any) -> GroupedQueryAttention.Config:
    """Returns attention whose projections have biases if `attention_bias` is set."""
    bias = settings.take("attention_bias", False)
    return attention(settings, qkv_bias=bias, output_bias=bias, **fields)


def attention_of(cfg: CausalLM.Config) -> GroupedQueryAttention.Config:
    """Returns the attention of a model, that of a layer with positions if there is one."""
    layers = [layer.self_attention for layer in layers_of(cfg.decoder)]
    attentions = [layer for layer in layers if isinstance(layer, GroupedQueryAttention.Config)]
    rotated = (layer for layer in attentions if layer.rope is not None)
    return expect(next(rotated, (attentions or layers)[0]), GroupedQueryAttention.Config)


def attention_settings(cfg: CausalLM.Config, *, partial_rotary: bool = False) -> dict[str, Any]:
    """Returns the settings that `model` and `attention` read."""
    attention = attention_of(cfg)
    head_dim = attention.head_dim or cfg.dim // attention.num_heads
    rope = attention.rope or RotaryEmbedding.default_config()
    rope = rope_settings(rope, head_dim if partial_rotary else None)
    return {
        **model_settings(cfg),
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads or attention.num_heads,
        "head_dim": head_dim,
        **rope_spellings(rope),
    }


# Kinds of layers in `layer_types`.
WINDOWED, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


def windows(settings: Settings, default: Callable[[int], bool]) -> list[int | None]:
    """Returns the window of each layer in tokens, None for no window, according to `layer_types`.

    Args:
        settings: Settings of config.json.
        default: Whether the layer of a number has a window, if `layer_types` is absent.
    """
    window, total = settings.take("sliding_window"), settings.take("num_hidden_layers")
    kinds = settings.take("layer_types", None) or [
        WINDOWED if default(n) else FULL for n in range(total)
    ]
    settings.expect(num_hidden_layers=len(kinds))
    known = {FULL: None} | ({} if window is None else {WINDOWED: window})
    return [settings.lookup("layer_types", kind, known) for kind in kinds]


def window_settings(cfg: CausalLM.Config, default: int | None = None) -> dict[str, Any]:
    """Returns the settings that `windows` reads; `default` is the window if no layer has one."""
    found = [layer.self_attention.window for layer in layers_of(cfg.decoder)]
    return {
        "layer_types": [WINDOWED if window else FULL for window in found],
        "sliding_window": max(window or 0 for window in found) or default,
    }


def expect_full_attention(settings: Settings) -> None:
    """Raises UserError if a layer of Qwen has a sliding window."""
    settings.expect(use_sliding_window=False)
    settings.skip("sliding_window", "max_window_layers")  # Unused without a sliding window.
    for kind in settings.take("layer_types", None) or []:
        settings.lookup("layer_types", kind, {"full_attention": None})


def feed_forward(hidden_dim: int) -> FeedForward.Config:
    """Returns a dense feed-forward layer."""
    return FeedForward.default_config().set(hidden_dim=hidden_dim, activation=Activation.SWIGLU)


_PER_TOKEN = "num_experts_per_tok"


def moe(
    settings: Settings,
    num_experts: str,
    hidden_dim: str,
    per_token: str = _PER_TOKEN,
    **fields: Any,
) -> MoELayer.Config:
    """Returns an MoE layer from the settings of these three names."""
    cfg = MoELayer.default_config().set(
        num_experts=settings.take(num_experts),
        num_experts_per_token=settings.take(per_token),
        hidden_dim=settings.take(hidden_dim),
    )
    return cfg.set(**fields)


def moe_settings(
    cfg: CausalLM.Config, num_experts: str, hidden_dim: str, per_token: str = _PER_TOKEN
) -> dict[str, Any]:
    """Returns the settings that `moe` reads."""
    found = moe_of(cfg)
    return {
        num_experts: found.num_experts,
        per_token: found.num_experts_per_token,
        hidden_dim: found.hidden_dim,
    }


def balance_settings(cfg: CausalLM.Config) -> dict[str, Any]:
    """Returns `router_aux_loss_coef` for a model trained with the balance loss of transformers.

    That loss pools all MoE layers and is K times ours. Other losses have no such setting.
    """
    layers = moe_layers_of(cfg)
    losses = [loss for layer in layers if (loss := layer.load_balance_loss) is not None]
    weights = [loss.weight for loss in losses if loss.scope is BalanceScope.ALL_LAYERS]
    if not weights or len(weights) < len(layers):
        return {}
    mean = sum(weights) / len(weights)
    return {"router_aux_loss_coef": mean / layers[0].num_experts_per_token}


# MoE settings that are written for a model of dense layers, which use none of them.
_UNUSED = MoELayer.default_config().set(
    num_experts=1, num_experts_per_token=1, hidden_dim=1, shared_experts=feed_forward(1)
)


def moe_of(cfg: CausalLM.Config) -> MoELayer.Config:
    """Returns the config of the first MoE layer; of one that is not used for a dense model."""
    return next(iter(moe_layers_of(cfg)), _UNUSED)


def moe_layers_of(cfg: CausalLM.Config) -> list[MoELayer.Config]:
    """Returns the configs of all MoE layers."""
    parts = [layer.feed_forward for layer in layers_of(cfg.decoder)]
    return [part for part in parts if isinstance(part, MoELayer.Config)]


# -- Models --------------------------------------------------------------------------------------


def model(settings: Settings, attention: Any, feed_forward: Any, **fields: Any) -> CausalLM.Config:
    """Returns the model whose layers have these two parts; a list has a part for each layer.

    The fields are those of every layer; the last norm of the model is of the same kind.

    Raises:
        UserError: If a setting of the file was never read.
    """
    settings.expect(hidden_act="silu")
    if rate := settings.take("attention_dropout", 0.0):
        logger.warning("%s: attention_dropout=%s has no effect in moelib.", settings.source, rate)
    total = settings.take("num_hidden_layers")
    each = (x if isinstance(x, list) else [x] * total for x in (attention, feed_forward))
    last = fields.get("norm") or fields.get("output_norm") or norm(settings)
    layer = TransformerLayer.default_config().set(norm=last).set(**fields)
    layers = [layer.clone(self_attention=a, feed_forward=f) for a, f in zip(*each, strict=True)]
    tied = settings.take("tie_word_embeddings", False)
    cfg = CausalLM.default_config().set(
        vocab_size=settings.take("vocab_size"),
        dim=settings.take("hidden_size"),
        decoder=stack(layers),
        output_norm=last.clone(),
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
    """Returns the shortest stack of these layers: first layers, then a block that repeats."""
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
