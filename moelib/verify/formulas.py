"""Kernels and layers of the library as formulas in NumPy and float64.

A formula reads a layer's config, its parameters and its children; no code of the layer. Layers
without a formula, such as a user's own, are run.

Shapes: B batch, S sequence, D model, H heads, E experts, K experts per token, V vocabulary.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from scipy.special import expit, ndtr

from moelib.core.module import functional
from moelib.core.tree import Batch, Nested
from moelib.kernels.flash_attention import MaskSpec
from moelib.layers.activation import Activation
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.attention.latent import LatentAttention
from moelib.layers.embedding import Embedding
from moelib.layers.feed_forward import FeedForward
from moelib.layers.linear import Linear
from moelib.layers.moe.balance import BalanceScope
from moelib.layers.moe.layer import MoELayer
from moelib.layers.moe.router import GroupScore, Router, Routing, Score
from moelib.layers.norm import LayerNorm, RMSNorm
from moelib.layers.rope import (
    LinearRotaryEmbedding,
    Llama3RotaryEmbedding,
    RotaryEmbedding,
    YarnRotaryEmbedding,
)
from moelib.layers.transformer import LoopStack, TransformerLayer
from moelib.verify.float64 import in_float64
from moelib.verify.plain import capacity_of, wide

Arrays = dict[str, np.ndarray]


def run(layer: Any, params: Nested, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Returns the outputs of a layer's own code in float64, and its own auxiliary losses."""

    def forward(params: Nested, inputs: Any) -> Any:
        outputs, found = functional(layer, jax.random.key(0), params, inputs, is_training=True)
        losses = {n: x for n, x in found.aux_losses.items() if not isinstance(x, dict)}
        return outputs, {name: loss.value for name, loss in losses.items()}

    inputs = dict(zip(inspect.signature(layer.forward).parameters, args, strict=False)) | kwargs
    narrow = jax.tree.map(lambda x: np.float32(x) if x.dtype == np.float64 else x, (params, inputs))
    fn = in_float64(forward, *narrow)
    with jax.enable_x64(True):
        return jax.device_get(fn(wide(params), inputs))


def output(layer: Any, params: Nested, *args: Any, **kwargs: Any) -> Any:
    """Returns the output of a layer by its formula; by its own code if there is none."""
    if (formula := FORMULAS.get(type(layer))) is None:
        return run(layer, params, *args, **kwargs)[0]
    return formula(layer, wide(params), *args, **kwargs)


# -- Kernels ---------------------------------------------------------------------------------------


def gmm(lhs: np.ndarray, rhs: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Returns the products of groups of rows, each with its matrix; 0 for rows of no group."""
    out, ends = np.zeros((len(lhs), rhs.shape[2])), np.cumsum(sizes)
    for matrix, begin, end in zip(rhs, ends - sizes, ends, strict=True):
        out[begin:end] = lhs[begin:end] @ matrix
    return out


def token_losses(hidden: np.ndarray, head: np.ndarray, labels: np.ndarray, z_loss: float) -> Any:
    """Returns the sum of the losses of tokens with a label, with the weighted z-loss."""
    logits = hidden @ head
    lse = np.log(np.exp(logits).sum(-1))
    nll = lse - np.take_along_axis(logits, np.maximum(labels, 0)[..., None], -1)[..., 0]
    return float((nll + z_loss * lse**2)[labels >= 0].sum())


def attention(
    q: Any, k: Any, v: Any, spec: MaskSpec, segment_ids: np.ndarray, sinks: Any = None
) -> np.ndarray:
    """Returns softmax attention inside of each segment, [B, S, H, Dh]."""
    k, v = (np.repeat(x, q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k, optimize=True) * spec.scale
    if spec.logit_cap is not None:
        scores = spec.logit_cap * np.tanh(scores / spec.logit_cap)
    ahead = np.subtract.outer(np.arange(q.shape[1]), np.arange(q.shape[1]))
    seen = (ahead >= 0) & (ahead < (spec.window or q.shape[1]))
    seen = seen[None] & (segment_ids[:, :, None] == segment_ids[:, None, :])
    exp = np.where(seen[:, None], np.exp(scores), 0.0)
    sink = 0.0 if sinks is None else np.exp(sinks)[None, :, None, None]
    weights = exp / (exp.sum(-1, keepdims=True) + sink)
    return np.einsum("bhqk,bkhd->bqhd", weights, v, optimize=True)


# -- Layers ----------------------------------------------------------------------------------------


def _rms_norm(layer: Any, p: Nested, x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + layer.config.eps) * p["scale"]


def _layer_norm(layer: Any, p: Nested, x: np.ndarray) -> np.ndarray:
    std = np.sqrt(x.var(-1, keepdims=True) + layer.config.eps)
    return (x - x.mean(-1, keepdims=True)) / std * p["scale"] + p.get("bias", 0.0)


def _linear(layer: Any, p: Nested, x: np.ndarray) -> np.ndarray:
    del layer
    return x @ p["weight"] + p.get("bias", 0.0)


_ACTIVATIONS: dict[Activation, Callable[..., np.ndarray]] = {
    Activation.SWIGLU: lambda gate, up: gate * expit(gate) * up,
    Activation.CLAMPED_SWIGLU: lambda gate, up: (
        np.minimum(gate, 7) * expit(1.702 * np.minimum(gate, 7)) * (np.clip(up, -7, 7) + 1)
    ),
    Activation.GEGLU: lambda gate, up: gate * ndtr(gate) * up,
    Activation.GELU: lambda x: x * ndtr(x),
    Activation.SILU: lambda x: x * expit(x),
    Activation.RELU: lambda x: np.maximum(x, 0),
}


def _feed_forward(layer: Any, p: Nested, x: np.ndarray, mask: Any = None) -> np.ndarray:
    del mask
    return _ACTIVATIONS[layer.config.activation](*(x @ w for w in p["up"])) @ p["down"]


def routing(cfg: Router.Config, params: Nested, x: np.ndarray) -> Arrays:
    """Returns the router's logits and probabilities [B, S, E], ids and weights [B, S, K]."""
    logits = x @ np.float64(params["weight"]) + np.float64(params.get("bias", 0.0))
    exp = np.exp(logits)
    scores = 1 / (1 + 1 / exp) if cfg.score is Score.SIGMOID else exp / exp.sum(-1, keepdims=True)
    probs = scores / scores.sum(-1, keepdims=True)
    selection = scores + np.float64(params.get("bias_balancing", {}).get("bias", 0.0))
    if cfg.num_groups:
        grouped = selection.reshape(*selection.shape[:2], cfg.num_groups, -1)
        count = 2 if cfg.group_score is GroupScore.SUM_OF_TOP_2 else 1
        best = np.sort(grouped, -1)[..., -count:].sum(-1)
        kept = np.argsort(-best, -1, kind="stable")[..., : cfg.num_groups_per_token]
        allowed = (kept[..., None] == np.arange(cfg.num_groups)).any(-2)
        selection = np.where(allowed[..., None], grouped, -np.inf).reshape(selection.shape)
    ids = np.argsort(-selection, -1, kind="stable")[..., : cfg.num_experts_per_token]
    chosen = exp if cfg.score is Score.SOFTMAX_AFTER_TOP_K else scores
    weights = np.take_along_axis(chosen, ids, -1)
    if cfg.renormalize or cfg.score is Score.SOFTMAX_AFTER_TOP_K:
        weights = weights / weights.sum(-1, keepdims=True)
    weights = weights * cfg.scaling_factor
    return {"logits": logits, "probs": probs, "expert_ids": ids, "weights": weights}


def balance_loss(
    routed: Sequence[Arrays], mask: np.ndarray, scope: BalanceScope | None, earlier: Any = 0.0
) -> float:
    """Returns the load-balance loss of a layer, or of several for the scope ALL_LAYERS.

    Args:
        routed: Routing of each layer.
        mask: False for padding [B, S].
        scope: Tokens that share a loss.
        earlier: Numbers of assignments in earlier micro-batches [E], for GLOBAL_BATCH.
    """
    sequences = [mask & (np.arange(len(mask)) == i)[:, None] for i in range(len(mask))]
    total = 0.0
    for of in sequences if scope is BalanceScope.SEQUENCE else [mask]:
        probs = np.concatenate([each["probs"][of] for each in routed])
        ids = np.concatenate([each["expert_ids"][of] for each in routed])
        # The id of an assignment to no expert is E.
        counts = np.bincount(ids.ravel(), minlength=probs.shape[1])[: probs.shape[1]] + earlier
        load = float(counts / max(counts.sum(), 1) @ probs.sum(0)) / max(len(probs), 1)
        total += probs.shape[1] * load * of.sum() / mask.sum()
    return total


def router_losses(
    cfg: MoELayer.Config, routed: Arrays, mask: np.ndarray, params: Nested
) -> dict[str, float]:
    """Returns the auxiliary losses of one MoE layer, those that it does not have included."""
    scope = None if cfg.load_balance_loss is None else cfg.load_balance_loss.scope
    earlier = params.get("load_counter", {}).get("counts", 0.0)
    lse = np.log(np.exp(routed["logits"]).sum(-1))
    return {
        "load_balance_loss": balance_loss([routed], mask, scope, earlier),
        "router_z_loss": float(np.mean(lse[mask] ** 2)),
    }


def _within_capacity(cfg: MoELayer.Config, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Returns whether assignments are kept [B, S, K]: those of padding, and past capacity, are not.

    The first assignments of a sequence to an expert are kept, in the order of tokens.
    """
    kept = np.broadcast_to(mask[..., None], ids.shape).copy()
    if (factor := capacity_of(cfg.dispatcher)) is None:
        return kept
    for sequence, own in zip(kept, ids, strict=True):
        balanced = sequence.sum() / cfg.num_experts  # Without padding.
        room = np.full(cfg.num_experts, max(1, math.ceil(factor * balanced - 1e-4)))
        for at in np.argwhere(sequence):
            expert = own[tuple(at)]
            sequence[tuple(at)] = room[expert] > 0
            room[expert] -= 1
    return kept


def _moe(
    layer: Any, p: Nested, x: np.ndarray, mask: np.ndarray, routings: list[Arrays] | None = None
) -> np.ndarray:
    if type(layer.router) is Router:
        routed = routing(layer.router.config, p["router"], x)
    else:
        routed = run(layer.router, p["router"], x, mask)[0]._asdict()
    if routings is not None:
        routings.append(routed)
    kept = _within_capacity(layer.config, routed["expert_ids"], mask)
    experts, cfg, y = p["experts"], layer.experts.config, np.zeros_like(x)
    for i in range(cfg.num_experts):
        up_bias = experts["up_bias"][i] if cfg.bias else np.zeros(len(experts["up"][i]))
        up = (x @ w + b for w, b in zip(experts["up"][i], up_bias, strict=True))
        own = _ACTIVATIONS[cfg.activation](*up) @ experts["down"][i]
        own = own + (experts["down_bias"][i] if cfg.bias else 0.0)
        weight = np.where(kept & (routed["expert_ids"] == i), routed["weights"], 0.0).sum(-1)
        y += weight[..., None] * own
    if layer.config.local_experts is not None:
        arrays: dict[str, Any] = {**routed, "mask": mask}
        at = Routing(**arrays)
        y = y + output(layer.local_experts, p.get("local_experts", {}), x, at)
    if "shared_experts" in p:
        gate = expit(x @ p["shared_gate"]) if "shared_gate" in p else 1.0
        y = y + gate * output(layer.shared_experts, p["shared_experts"], x, mask)
    return y


def _grouped_query(
    layer: Any, p: Nested, x: np.ndarray, positions: np.ndarray, segment_ids: np.ndarray
) -> np.ndarray:
    cfg = layer.config
    q = np.einsum("bsd,dhk->bshk", x, p["q"]) + p.get("q_bias", 0.0)
    kv = np.einsum("bsd,dngk->bsngk", x, p["kv"]) + p.get("kv_bias", 0.0)
    k, v = kv[:, :, 0], kv[:, :, 1]
    if cfg.qk_norm is not None:
        flat = lambda x: x.reshape(*x.shape[:2], -1) if cfg.qk_norm_joint else x
        q = output(layer.q_norm, p["q_norm"], flat(q)).reshape(q.shape)
        k = output(layer.k_norm, p["k_norm"], flat(k)).reshape(k.shape)
    if cfg.qkv_clip is not None:
        q, k, v = (np.clip(each, -cfg.qkv_clip, cfg.qkv_clip) for each in (q, k, v))
    if cfg.rope is not None:
        q, k = (rotated(layer.rope, p.get("rope", {}), each, positions) for each in (q, k))
    spec = MaskSpec(q.shape[-1] ** -0.5, window=cfg.window, logit_cap=cfg.logit_cap)
    out = attention(q, k, v, spec, segment_ids, p.get("sinks"))
    return np.einsum("bshk,hkd->bsd", out, p["output"]) + p.get("output_bias", 0.0)


def _latent(
    layer: Any, p: Nested, x: np.ndarray, positions: np.ndarray, segment_ids: np.ndarray
) -> np.ndarray:
    cfg, nope = layer.config, layer.config.nope_head_dim
    turned = lambda x: (
        x if cfg.rope is None else rotated(layer.rope, p.get("rope", {}), x, positions)
    )
    if cfg.q_lora_rank is None:
        q = np.einsum("bsd,dhk->bshk", x, p["q"])
    else:
        latent = output(layer.q_norm, p["q_norm"], x @ p["q_down"])
        q = np.einsum("bsd,dhk->bshk", latent, p["q_up"])
    q = np.concatenate([q[..., :nope], turned(q[..., nope:])], -1)
    latent = output(layer.kv_norm, p["kv_norm"], x @ p["kv_down"])
    kv = np.einsum("bsd,dhk->bshk", latent, p["kv_up"])
    shared = np.repeat(turned((x @ p["k_rope"])[:, :, None]), cfg.num_heads, 2)
    k = np.concatenate([kv[..., :nope], shared], -1)
    spec = MaskSpec(cfg.score_factor / math.sqrt(nope + cfg.rope_head_dim))
    out = attention(q, k, kv[..., nope:], spec, segment_ids)
    return np.einsum("bshk,hkd->bsd", out, p["output"])


def rotated(rope: Any, p: Nested, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns heads turned by their positions."""
    cfg, factor = rope.config, 1.0
    dim = dict(cfg.items()).get("rotary_dim") or x.shape[-1]
    if type(rope) not in FREQUENCIES:
        return run(rope, p, x, positions)[0]
    frequencies = FREQUENCIES[type(rope)](cfg, cfg.theta ** (-np.arange(0, dim, 2) / dim))
    if type(rope) is YarnRotaryEmbedding:
        m, m_all = (0.1 * m * math.log(cfg.factor) + 1 for m in (cfg.mscale, cfg.mscale_all_dim))
        factor = m / m_all if cfg.attention_factor is None else cfg.attention_factor
    angle = positions[..., None, None] * frequencies
    turned = (x[..., : dim // 2] + 1j * x[..., dim // 2 : dim]) * factor * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag, x[..., dim:]], -1)


def _llama3(cfg: Any, frequencies: np.ndarray) -> np.ndarray:
    turns = cfg.original_context * frequencies / (2 * np.pi)
    smooth = (turns - cfg.low_freq_factor) / (cfg.high_freq_factor - cfg.low_freq_factor)
    between = (1 - smooth) * frequencies / cfg.factor + smooth * frequencies
    slowed = np.where(turns < cfg.low_freq_factor, frequencies / cfg.factor, between)
    return np.where(turns > cfg.high_freq_factor, frequencies, slowed)


def _yarn(cfg: Any, frequencies: np.ndarray) -> np.ndarray:
    # The pair, as a real number, with this many turns in the original context.
    pair = lambda turns: (
        len(frequencies) * math.log(cfg.original_context / (2 * np.pi * turns), cfg.theta)
    )
    begin, end = pair(cfg.beta_fast), pair(cfg.beta_slow)
    if cfg.truncate:
        begin, end = math.floor(begin), math.ceil(end)
    begin, end = max(begin, 0), min(end, 2 * len(frequencies) - 1)
    share = np.clip((np.arange(len(frequencies)) - begin) / max(end - begin, 1e-3), 0, 1)
    return frequencies * (1 - share + share / cfg.factor)


FREQUENCIES: dict[type, Callable[[Any, np.ndarray], np.ndarray]] = {
    RotaryEmbedding: lambda _, frequencies: frequencies,
    LinearRotaryEmbedding: lambda cfg, frequencies: frequencies / cfg.factor,
    Llama3RotaryEmbedding: _llama3,
    YarnRotaryEmbedding: _yarn,
}


def _transformer_layer(
    layer: Any, p: Nested, x: np.ndarray, mask: np.ndarray, routings: Any = None, **where: Any
) -> np.ndarray:
    x = x + output(
        layer.self_attention,
        p["self_attention"],
        output(layer.attention_norm, p["attention_norm"], x),
        **where,
    )
    normalized = output(layer.feed_forward_norm, p["feed_forward_norm"], x)
    more = {"routings": routings} if type(layer.feed_forward) is MoELayer else {}
    return x + output(layer.feed_forward, p["feed_forward"], normalized, mask, **more)


def _stack(layer: Any, p: Nested, x: np.ndarray, **inputs: np.ndarray) -> np.ndarray:
    for name, child in layer.children.items():
        known = inputs if type(child) in FORMULAS else {**inputs, "routings": None}
        x = output(child, p.get(name, {}), x, **{n: v for n, v in known.items() if v is not None})
    return x


def model_losses(model: Any, params: Nested, batch: Batch) -> tuple[float, float]:
    """Returns the sum of a `CausalLM`'s losses of tokens with a label, and the balance loss.

    The latter is that of the scope ALL_LAYERS, whatever the layers' own; 0 without MoE layers.
    """
    p, segments, routings = wide(params), batch["segment_ids"], list[Arrays]()
    inputs: dict[str, Any] = {"positions": batch["positions"], "segment_ids": segments}
    inputs |= {"mask": segments > 0}
    if type(model.decoder) in FORMULAS:
        inputs |= {"routings": routings}
    x = output(model.embedding, p["embedding"], batch["input_ids"])
    hidden = output(
        model.output_norm, p["output_norm"], output(model.decoder, p["decoder"], x, **inputs)
    )
    head = p["lm_head"]["weight"] if "lm_head" in p else p["embedding"]["weight"].T
    total = token_losses(hidden, head, batch["target_labels"], model.config.z_loss)
    pooled = balance_loss(routings, segments > 0, BalanceScope.ALL_LAYERS) if routings else 0.0
    return total, pooled


FORMULAS: dict[type, Callable[..., Any]] = {
    RMSNorm: _rms_norm,
    LayerNorm: _layer_norm,
    Linear: _linear,
    Embedding: lambda layer, p, ids: p["weight"][ids],
    FeedForward: _feed_forward,
    MoELayer: _moe,
    GroupedQueryAttention: _grouped_query,
    LatentAttention: _latent,
    TransformerLayer: _transformer_layer,
    LoopStack: _stack,
}
