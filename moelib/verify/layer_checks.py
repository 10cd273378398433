"""Kernels and layers against NumPy in float64, on operands that expose mistakes of indexing.

Documents begin at multiples of every block size and elsewhere; an expert has no tokens, and another
most of them; tokens tie; the end is padding.
"""

import functools
import itertools
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
from moelib.verify.reference import Reference

_TOLERANCE = 1e-5  # Of float32 kernels, relative to the largest entry.
_BACKENDS = ("xla", "tpu")  # Those of TPUs are interpreted.
_SEGMENTS = np.repeat([1, 2, 3, 4, 0], [64, 36, 28, 64, 8])[None].astype(np.int32)

Arrays = dict[str, np.ndarray]
Kernel = Callable[..., Any]


def kernels(known: Reference) -> Difference | None:
    """Compares grouped matmul, loss, and attention with the masks of the model, and gradients."""
    cases = _kernel_cases(known.probe.trainer.model)
    return next(filter(None, itertools.starmap(_compare, cases)), None)


def _kernel_cases(model: Any) -> Iterator[tuple[str, Kernel, Kernel, Arrays]]:
    """Yields name, kernel, formula and operands."""
    rng = np.random.default_rng(0)
    normal = lambda **shapes: {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    sizes = np.array([0, 130, 1, 64, 5], np.int32)  # 10 of 210 rows are of no group.
    operands = normal(lhs=(210, 64), rhs=(5, 64, 64))
    for backend in _BACKENDS:
        run = functools.partial(gmm, group_sizes=jnp.asarray(sizes), backend=backend)
        yield f"gmm by {backend}", run, functools.partial(_gmm, sizes=sizes), operands

    labels = np.where(np.arange(70) % 7 == 3, -1, rng.integers(0, 50, 70)).astype(np.int32)
    z_loss = dict(model.config.items()).get("z_loss") or 0.01
    options: dict[str, Any] = {"labels": jnp.asarray(labels), "z_loss": z_loss, "chunk_size": 16}
    loss = lambda **x: cross_entropy(**x, **options).loss
    formula = functools.partial(_loss, labels=labels, z_loss=z_loss)
    yield "cross_entropy", loss, formula, normal(hidden=(70, 16), head=(16, 50))

    masks = {
        (min(cfg.get("window") or 999, 100), cfg.get("logit_cap"), bool(cfg.get("sinks")))
        for layer, _ in model.walk()
        if (cfg := dict(layer.config.items())).keys() & {"num_heads"}
    }
    for window, cap, has_sinks in sorted(masks, key=str):
        operands = normal(q=(1, 200, 2, 64), k=(1, 200, 1, 64), v=(1, 200, 1, 64))
        operands |= normal(sinks=(2,)) if has_sinks else {}
        spec = MaskSpec(1 / 8, window=window, logit_cap=cap)
        formula = functools.partial(_attention, spec=spec, segment_ids=_SEGMENTS)
        options = {"spec": spec, "segment_ids": jnp.asarray(_SEGMENTS)}
        for backend in _BACKENDS:
            run = functools.partial(flash_attention, **options, backend=backend)
            yield f"attention by {backend}, window {window}", run, formula, operands


def _compare(name: str, fn: Kernel, oracle: Kernel, arrays: Arrays) -> Difference | None:
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


def _loss(hidden: np.ndarray, head: np.ndarray, labels: np.ndarray, z_loss: float) -> float:
    logits = hidden @ head
    lse = np.log(np.exp(logits).sum(-1))
    nll = lse - np.take_along_axis(logits, np.maximum(labels, 0)[:, None], -1)[:, 0]
    return float((nll + z_loss * lse**2)[labels >= 0].sum())


def _attention(
    q: Any, k: Any, v: Any, spec: MaskSpec, segment_ids: np.ndarray, sinks: Any = None
) -> np.ndarray:
    k, v = (np.repeat(x, q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * spec.scale
    if spec.logit_cap is not None:
        scores = spec.logit_cap * np.tanh(scores / spec.logit_cap)
    ahead = np.subtract.outer(np.arange(q.shape[1]), np.arange(q.shape[1]))
    seen = (ahead >= 0) & (ahead < (spec.window or q.shape[1]))
    seen = seen[None] & (segment_ids[:, :, None] == segment_ids[:, None, :])
    exp = np.where(seen[:, None], np.exp(scores), 0.0)
    sink = 0.0 if sinks is None else np.exp(sinks)[None, :, None, None]
    return np.einsum("bhqk,bkhd->bqhd", exp / (exp.sum(-1, keepdims=True) + sink), v)


# -- Layers --------------------------------------------------------------------------------------


def layers(known: Reference) -> Difference | None:
    """Compares routing, auxiliary losses and attention layers, one layer of each kind."""
    seen, params = set(), known.plain.layers_apart(known.start.model)
    for layer, _ in known.plain.model.walk():
        if (text := layer.config.clone(name="").debug_string()) in seen:
            continue
        seen.add(text)
        path, check = layer.path().replace(".", "/"), None
        own = functools.reduce(lambda tree, name: tree.get(name, {}), path.split("/"), params)
        if isinstance(layer, MoELayer) and type(layer.router) is Router:
            check = _moe(layer, own)
        elif type(layer) is GroupedQueryAttention:
            check = _attention_layer(layer, own)
        if check is None:
            continue
        named = ({f"{path}: {name}": x for name, x in values.items()} for values in check)
        if found := first_difference(*named, relative=1e-6, floor=1e-9):
            return found
    return None


def _run(layer: Any, params: Nested, *inputs: Any, **named: Any) -> tuple[Any, Any]:
    """Returns the outputs of a layer in float64, and its auxiliary losses."""

    def run(params: Nested, *inputs: Any) -> Any:
        given = dict(zip(named, inputs, strict=True)) if named else inputs
        outputs, found = functional(layer, None, params, given, is_training=True)
        return outputs, {name: loss.value for name, loss in found.aux_losses.items()}

    arguments = params, *inputs, *named.values()
    fn = in_float64(run, *arguments)
    with jax.enable_x64(True):
        return jax.device_get(fn(*wide(arguments)))


def _moe(layer: Any, params: Nested) -> tuple[Arrays, Arrays]:
    """Returns routing and auxiliary losses, expected and found."""
    cfg, rng, router = layer.config, np.random.default_rng(2), params["router"]
    x = rng.standard_normal((2, 24, cfg.input_dim)).astype(np.float32)
    x[0, 2:5] = 0  # Ties.
    x[0, 12:] += 3 * router["weight"][:, 0]  # Most tokens go to expert 0.
    mask = np.arange(24)[None] < np.array([[24], [14]])
    if "bias_balancing" in router:
        bias = 0.1 * rng.standard_normal(cfg.num_experts).astype(np.float32)
        router = {**router, "bias_balancing": {**router["bias_balancing"], "bias": bias}}
    want = _routing(layer.router.config, router, x.astype(np.float64))
    routing, _ = _run(layer.router, router, x, mask)
    got = {name: getattr(routing, name) for name in want}
    if type(layer) is not MoELayer:  # May define its own losses.
        return want, got
    _, losses = _run(layer, {**params, "router": router}, x, mask)
    chosen = np.zeros(mask.shape + (cfg.num_experts,))
    np.put_along_axis(chosen, want["expert_ids"], 1.0, -1)
    scope = None if cfg.load_balance_loss is None else cfg.load_balance_loss.scope
    by_sequence = [mask & (np.arange(2) == i)[:, None] for i in range(2)]
    loads = [
        float(chosen[of].mean(0) @ want["probs"][of].mean(0)) * of.sum() / mask.sum()
        for of in (by_sequence if scope is BalanceScope.SEQUENCE else [mask])
    ]
    log_sums = np.log(np.exp(want["logits"]).sum(-1))
    expected = {
        "load_balance_loss": cfg.num_experts / cfg.num_experts_per_token * sum(loads),
        "router_z_loss": np.mean(log_sums[mask] ** 2),
    }
    present = expected.keys() & losses.keys()
    return (
        want | {name: expected[name] for name in present},
        got | {name: losses[name] for name in present},
    )


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
    got, _ = _run(layer, params, x=x, positions=positions, segment_ids=segments)
    p = wide(params)
    q = np.einsum("bsd,dhk->bshk", x, p["q"]) + p.get("q_bias", 0.0)
    kv = np.einsum("bsd,dngk->bsngk", x, p["kv"]) + p.get("kv_bias", 0.0)
    k, v = kv[:, :, 0], kv[:, :, 1]
    if cfg.qk_norm is not None:
        flat = lambda x: np.float32(x.reshape(*x.shape[:2], -1) if cfg.qk_norm_joint else x)
        q = _run(layer.q_norm, params["q_norm"], flat(q))[0].reshape(q.shape)
        k = _run(layer.k_norm, params["k_norm"], flat(k))[0].reshape(k.shape)
    if cfg.qkv_clip is not None:
        q, k, v = (np.clip(each, -cfg.qkv_clip, cfg.qkv_clip) for each in (q, k, v))
    if cfg.rope is not None:
        q, k = (_rotated(layer.rope, each, positions) for each in (q, k))
    spec = MaskSpec(q.shape[-1] ** -0.5, window=cfg.window, logit_cap=cfg.logit_cap)
    out = _attention(q, k, v, spec, segments, p.get("sinks"))
    y = np.einsum("bshk,hkd->bsd", out, p["output"]) + p.get("output_bias", 0.0)
    return {"output": y}, {"output": got}


def _rotated(rope: Any, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    if type(rope) is not RotaryEmbedding:
        return _run(rope, {}, np.float32(x), positions)[0]
    dim = rope.config.rotary_dim or x.shape[-1]
    angle = positions[..., None, None] * rope.config.theta ** (-np.arange(0, dim, 2) / dim)
    turned = (x[..., : dim // 2] + 1j * x[..., dim // 2 : dim]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag, x[..., dim:]], -1)
