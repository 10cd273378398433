"""Kernels and layers against NumPy in float64, on operands that expose mistakes of indexing.

Documents begin at multiples of every block size and elsewhere; an expert has no tokens, and another
most of them; tokens tie; the end is padding.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moelib.core.module import functional
from moelib.core.tree import Nested
from moelib.kernels.cross_entropy import cross_entropy
from moelib.kernels.flash_attention import MaskSpec, flash_attention
from moelib.kernels.gmm import gmm
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.moe.balance import BalanceScope
from moelib.layers.moe.layer import MoELayer
from moelib.layers.moe.router import GroupScore, Router, Score
from moelib.layers.rope import RotaryEmbedding
from moelib.verify.compare import Difference, first_difference
from moelib.verify.float64 import in_float64
from moelib.verify.plain import wide

_TOLERANCE = 1e-5  # Of float32 kernels, relative to the largest entry.
_BACKENDS = ("xla", "tpu")  # Those of TPUs are interpreted.

Arrays = dict[str, np.ndarray]


def kernels(model: Any, z_loss: float) -> Difference | None:
    """Compares grouped matmul, loss, and attention with the masks of the model, and gradients."""
    rng = np.random.default_rng(0)
    sizes = np.array([0, 130, 1, 64, 5], np.int32)  # 10 of 210 rows are of no group.
    rows = {"lhs": rng.standard_normal((210, 64)), "rhs": rng.standard_normal((5, 64, 64))}
    for backend in _BACKENDS:
        run = lambda lhs, rhs, b=backend: gmm(lhs, rhs, jnp.asarray(sizes), backend=b)
        if found := _compare(f"gmm by {backend}", run, lambda **x: _gmm(sizes=sizes, **x), rows):
            return found
    labels = np.where(np.arange(70) % 7 == 3, -1, rng.integers(0, 50, 70)).astype(np.int32)
    arrays = {"hidden": rng.standard_normal((70, 16)), "head": rng.standard_normal((16, 50))}
    loss = lambda hidden, head: (
        cross_entropy(hidden, head, jnp.asarray(labels), z_loss=z_loss, chunk_size=16).loss
    )
    oracle = lambda hidden, head: _loss(hidden @ head, labels, z_loss)
    if found := _compare("cross_entropy", loss, oracle, arrays):
        return found
    return next(filter(None, _attention_kernels(model, rng)), None)


def _attention_kernels(model: Any, rng: Any) -> Iterator[Difference | None]:
    masks = {
        (min(cfg.get("window") or 999, 100), cfg.get("logit_cap"), bool(cfg.get("sinks")))
        for layer, _ in model.walk()
        if (cfg := dict(layer.config.items())).keys() & {"num_heads"}
    }
    shapes = {"q": (1, 200, 2, 64), "k": (1, 200, 1, 64), "v": (1, 200, 1, 64)}
    for window, cap, has_sinks in sorted(masks, key=str):
        spec = MaskSpec(1 / 8, window=window, logit_cap=cap)
        arrays = {n: rng.standard_normal(shape) for n, shape in shapes.items()}
        arrays |= {"sinks": rng.standard_normal(2)} if has_sinks else {}
        oracle = lambda spec=spec, **x: _attention(_SEGMENTS, spec, **x)
        for backend in _BACKENDS:

            def run(
                q: Any, k: Any, v: Any, sinks: Any = None, *, s: Any = spec, b: str = backend
            ) -> Any:
                ids = jnp.asarray(_SEGMENTS)
                return flash_attention(q, k, v, s, segment_ids=ids, sinks=sinks, backend=b)

            yield _compare(f"attention by {backend}, window {window}", run, oracle, arrays)


_SEGMENTS = np.repeat([1, 2, 3, 4, 0], [64, 36, 28, 64, 8])[None].astype(np.int32)


def _compare(
    name: str, fn: Callable[..., Any], oracle: Callable[..., Any], arrays: Arrays
) -> Difference | None:
    """Compares values, and gradients with finite differences of the oracle."""

    def run(operands: Any, weights: Any) -> Any:
        value, pull = jax.vjp(lambda operands: fn(**operands), operands)
        return value, pull(weights)[0]

    rng, want = np.random.default_rng(1), np.asarray(oracle(**arrays))
    weights = rng.standard_normal(want.shape)
    quick = {"xla_backend_optimization_level": 0}
    narrow = jax.tree.map(jnp.float32, (arrays, weights))
    value, gradients = jax.device_get(jax.jit(run, compiler_options=quick)(*narrow))
    if found := first_difference({name: want}, {name: value}, relative=_TOLERANCE):
        return found
    for operand, x in arrays.items():
        direction = rng.standard_normal(x.shape)
        ends = (oracle(**{**arrays, operand: x + h * direction}) for h in (1e-6, -1e-6))
        expected = float(np.vdot(weights, np.subtract(*ends))) / 2e-6
        found = float(np.vdot(gradients[operand].astype(np.float64), direction))
        text = f"{name}: derivative along a direction of {operand}"
        allowed = _TOLERANCE * float(np.linalg.norm(gradients[operand]))
        if found := first_difference({text: expected}, {text: found}, relative=0, floor=allowed):
            return found
    return None


def _gmm(lhs: np.ndarray, rhs: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    out, ends = np.zeros((len(lhs), rhs.shape[2])), np.cumsum(sizes)
    for matrix, begin, end in zip(rhs, ends - sizes, ends, strict=True):
        out[begin:end] = lhs[begin:end] @ matrix
    return out


def _loss(logits: np.ndarray, labels: np.ndarray, z_loss: float) -> float:
    lse = np.log(np.exp(logits).sum(-1))
    nll = lse - np.take_along_axis(logits, np.maximum(labels, 0)[:, None], -1)[:, 0]
    return float((nll + z_loss * lse**2)[labels >= 0].sum())


def _attention(
    segments: np.ndarray, spec: MaskSpec, q: Any, k: Any, v: Any, sinks: Any = None
) -> np.ndarray:
    k, v = (np.repeat(x, q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * spec.scale
    if spec.logit_cap is not None:
        scores = spec.logit_cap * np.tanh(scores / spec.logit_cap)
    ahead = np.subtract.outer(np.arange(q.shape[1]), np.arange(q.shape[1]))
    seen = (ahead >= 0) & (ahead < (spec.window or q.shape[1]))
    seen = seen[None] & (segments[:, :, None] == segments[:, None, :])
    exp = np.where(seen[:, None], np.exp(scores), 0.0)
    sink = 0.0 if sinks is None else np.exp(sinks)[None, :, None, None]
    return np.einsum("bhqk,bkhd->bqhd", exp / (exp.sum(-1, keepdims=True) + sink), v)


# -- Layers --------------------------------------------------------------------------------------


def layers(model: Any, params: Nested) -> Difference | None:
    """Compares routing, auxiliary losses and attention layers, one layer of each kind."""
    seen = set()
    for layer, _ in model.walk():
        if (text := layer.config.clone(name="").debug_string()) in seen:
            continue
        seen.add(text)
        own = params
        for name in layer.path().split(".") if layer.path() else ():
            own = own.get(name, {})
        check = None
        if isinstance(layer, MoELayer) and type(layer.router) is Router:
            check = _moe(layer, own)
        elif type(layer) is GroupedQueryAttention:
            check = _attention_layer(layer, own)
        if check is not None and (found := first_difference(*check, relative=1e-6, floor=1e-9)):
            return found
    return None


def _run(fn: Callable[..., Any], *arguments: Any) -> Any:
    with jax.enable_x64(False):
        run = in_float64(fn, *arguments)
    with jax.enable_x64(True):
        return jax.device_get(run(*wide(arguments)))


def _moe(layer: Any, params: Nested) -> tuple[Arrays, Arrays]:
    """Returns routing and auxiliary losses, expected and found."""
    cfg, rng = layer.config, np.random.default_rng(2)
    x = rng.standard_normal((2, 24, cfg.input_dim)).astype(np.float32)
    router = params["router"]
    x[0, 2:5] = 0  # Ties.
    x[0, 12:] += 3 * router["weight"][:, 0]  # Most tokens go to expert 0.
    mask = np.arange(24)[None] < np.array([[24], [14]])
    if "bias_balancing" in router:
        bias = 0.1 * rng.standard_normal(cfg.num_experts).astype(np.float32)
        balancing = {**router["bias_balancing"], "bias": bias}
        params = {**params, "router": {**router, "bias_balancing": balancing}}

    def run(params: Nested, x: Any, mask: Any) -> Any:
        _, found = functional(layer, None, params, (x, mask), is_training=True)
        routing, _ = functional(layer.router, None, params["router"], (x, mask), is_training=True)
        return routing, {name: loss.value for name, loss in found.aux_losses.items()}

    routing, losses = _run(run, params, x, mask)
    want = _routing(layer.router.config, params["router"], x.astype(np.float64))
    got = {name: getattr(routing, name) for name in want}
    fractions = np.zeros(mask.shape + (cfg.num_experts,))
    np.put_along_axis(fractions, want["expert_ids"], 1.0, -1)
    if type(layer) is not MoELayer:  # May define its own losses.
        losses = {}
    balance = cfg.load_balance_loss
    if balance is not None and balance.scope is not BalanceScope.ALL_LAYERS:
        groups = (
            [mask]
            if balance.scope is not BalanceScope.SEQUENCE
            else [mask & (np.arange(2) == i)[:, None] for i in range(2)]
        )
        values = [
            cfg.num_experts
            / cfg.num_experts_per_token
            * float(fractions[of].mean(0) @ want["probs"][of].mean(0))
            * of.sum()
            / mask.sum()
            for of in groups
        ]
        want["load_balance_loss"] = np.asarray(sum(values))
    if cfg.router_z_loss is not None:
        lse = np.log(np.exp(want["logits"]).sum(-1))
        want["router_z_loss"] = np.mean(lse[mask] ** 2)
    want = {name: x for name, x in want.items() if name in {*got, *losses}}
    got |= {name: losses[name] for name in want if name in losses}
    named = [{f"{layer.path()}: {n}": x for n, x in each.items()} for each in (want, got)]
    return named[0], named[1]


def _routing(cfg: Any, params: Nested, x: np.ndarray) -> Arrays:
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
    return {
        "logits": logits,
        "probs": probs,
        "expert_ids": ids,
        "weights": weights * cfg.scaling_factor,
    }


def _attention_layer(layer: Any, params: Nested) -> tuple[Arrays, Arrays]:
    """Returns the output of an attention layer, expected and found."""
    cfg, rng = layer.config, np.random.default_rng(3)
    x = rng.standard_normal((1, 24, cfg.input_dim)).astype(np.float32)
    segments = np.repeat([1, 2, 0], [9, 12, 3])[None].astype(np.int32)
    positions = np.concatenate([np.arange(9), np.arange(12), np.arange(3)])[None].astype(np.int32)
    inputs = {"x": x, "positions": positions, "segment_ids": segments}
    call = lambda layer, params, inputs: functional(layer, None, params, inputs, is_training=True)[
        0
    ]
    got = _run(lambda params, inputs: call(layer, params, inputs), params, inputs)
    p = wide(params)
    q = np.einsum("bsd,dhk->bshk", x, p["q"]) + p.get("q_bias", 0.0)
    kv = np.einsum("bsd,dngk->bsngk", x, p["kv"]) + p.get("kv_bias", 0.0)
    k, v = kv[:, :, 0], kv[:, :, 1]
    if cfg.qk_norm is not None:
        flat = lambda x: x.reshape(*x.shape[:2], -1) if cfg.qk_norm_joint else x
        norm = lambda layer, own, x: _run(lambda own, x: call(layer, own, (x,)), own, flat(x))
        q = norm(layer.q_norm, params["q_norm"], np.float32(q)).reshape(q.shape)
        k = norm(layer.k_norm, params["k_norm"], np.float32(k)).reshape(k.shape)
    if cfg.qkv_clip is not None:
        q, k, v = (np.clip(each, -cfg.qkv_clip, cfg.qkv_clip) for each in (q, k, v))
    if cfg.rope is not None:
        q, k = (_rotated(layer.rope, each, positions) for each in (q, k))
    spec = MaskSpec(q.shape[-1] ** -0.5, window=cfg.window, logit_cap=cfg.logit_cap)
    out = _attention(segments, spec, q, k, v, p.get("sinks"))
    y = np.einsum("bshk,hkd->bsd", out, p["output"]) + p.get("output_bias", 0.0)
    return {layer.path(): y}, {layer.path(): got}


def _rotated(rope: Any, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    if type(rope) is not RotaryEmbedding:
        run = lambda x, at: functional(rope, None, {}, (x, at), is_training=True)[0]
        return _run(run, np.float32(x), positions)
    dim = rope.config.rotary_dim or x.shape[-1]
    angle = positions[..., None, None] * rope.config.theta ** (-np.arange(0, dim, 2) / dim)
    turned = (x[..., : dim // 2] + 1j * x[..., dim // 2 : dim]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag, x[..., dim:]], -1)
