"""Kernels and layers against formulas, on operands that expose mistakes of indexing.

Documents begin at multiples of every block size and elsewhere; an expert has no tokens, and another
most of them; tokens tie; the end is padding.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moelib.core import tree
from moelib.core.module import functional
from moelib.core.tree import Nested
from moelib.kernels.cross_entropy import cross_entropy
from moelib.kernels.flash_attention import MaskSpec, flash_attention
from moelib.kernels.gmm import gmm
from moelib.layers.carry import carry_names
from moelib.layers.moe.balance import BalanceScope, BiasBalancing, LoadCounter
from moelib.layers.moe.experts import FeedForwardExperts
from moelib.layers.moe.layer import MoELayer
from moelib.layers.moe.router import Router
from moelib.layers.norm import LayerNorm, RMSNorm
from moelib.layers.transformer import LoopStack, TransformerLayer
from moelib.models.causal_lm import CausalLM
from moelib.verify import formulas
from moelib.verify.compare import Difference, first_difference
from moelib.verify.formulas import Arrays
from moelib.verify.plain import Plain, capacity_of
from moelib.verify.reference import Reference

_SEGMENTS = np.stack(
    [np.repeat([1, 2, 3, 4, 0], [64, 36, 28, 64, 8]), np.repeat([1, 0], [190, 10])]
).astype(np.int32)
_LONG = np.repeat([1, 2, 0], [300, 320, 20])[None].astype(np.int32)  # Parts of two blocks in XLA.

Kernel = Callable[..., Any]


# -- Kernels -------------------------------------------------------------------------------------


class _Precision(NamedTuple):
    dtype: np.dtype  # Of operands.
    tolerance: float  # Of values and derivatives, relative to the largest entry.


_SINGLE, _HALF = _Precision(np.dtype("float32"), 1e-5), _Precision(np.dtype("float16"), 3e-3)


def kernels(known: Reference) -> Difference | None:
    """Compares grouped matmul, loss, and attention with the masks of the model, and gradients.

    The kernels of TPUs are interpreted.
    """
    model, rng = known.probe.trainer.model, np.random.default_rng(0)
    labels = np.where(np.arange(70) % 7 == 3, -1, rng.integers(0, 50, 70)).astype(np.int32)
    z_loss = dict(model.config.items()).get("z_loss") or 0.01
    options: dict[str, Any] = {"labels": jnp.asarray(labels), "z_loss": z_loss, "chunk_size": 16}
    loss = lambda **x: cross_entropy(**x, **options).loss
    formula = functools.partial(formulas.token_losses, labels=labels, z_loss=z_loss)
    operands = {
        name: rng.standard_normal(n) for name, n in (("hidden", (70, 16)), ("head", (16, 50)))
    }
    return _compare("cross_entropy", loss, formula, operands) or _kernels(model, "xla", "tpu")


def gpu_kernels(known: Reference) -> Difference | None:
    """Compares the kernels of GPUs, interpreted, in float16."""
    return _kernels(known.probe.trainer.model, "gpu", precision=_HALF)


def _kernels(model: Any, *backends: str, precision: _Precision = _SINGLE) -> Difference | None:
    """Compares grouped matmul and attention at the sizes of the model's layers."""
    rng = np.random.default_rng(0)
    normal = lambda **shapes: {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    cases: dict[str, tuple[Kernel, Kernel, Arrays, tuple[str, ...]]] = {}
    for layer, _ in model.walk():
        cfg = dict(layer.config.items())
        if isinstance(layer, FeedForwardExperts):
            num, own = cfg["num_experts"], (cfg["input_dim"], cfg["hidden_dim"])
            sizes = np.resize([0, 130, 1, 64, 5], num).astype(np.int32)  # 10 rows are of no group.
            for dims, takers in ((own, backends), ((200, 264), ("xla", "tpu"))):
                operands = normal(lhs=(sizes.sum() + 10, dims[0]), rhs=(num, *dims))
                formula = functools.partial(formulas.gmm, sizes=sizes)
                run = functools.partial(gmm, group_sizes=jnp.asarray(sizes))
                cases[f"gmm of {num} x {dims}"] = run, formula, operands, takers
        if "num_heads" in cfg:
            # Head dimensions that kernels take: those of DeepSeek, and 64.
            dim, v_dim = (192, 128) if "v_head_dim" in cfg else (64, 64)
            for segments, heads, window, takers in _attention_cases(cfg, backends):
                tokens = segments.shape
                operands = normal(q=(*tokens, heads[0], dim), k=(*tokens, heads[1], dim))
                operands |= normal(v=(*tokens, heads[1], v_dim))
                operands |= normal(sinks=heads[:1]) if cfg.get("sinks") else {}
                spec = MaskSpec(dim**-0.5, window=window, logit_cap=cfg.get("logit_cap"))
                formula = functools.partial(formulas.attention, spec=spec, segment_ids=segments)
                ids = jnp.asarray(segments)
                run = functools.partial(flash_attention, spec=spec, segment_ids=ids)
                text = f"attention with {spec}, {tokens} tokens, {heads} heads of {dim} and {v_dim}"
                cases[text] = run, formula, operands, takers
    for name, (run, formula, operands, takers) in cases.items():
        for backend in (each for each in backends if each in takers):
            of_backend = functools.partial(run, backend=backend)
            text = f"{name} by {backend}"
            if found := _compare(text, of_backend, formula, operands, precision):
                return found
    return None


def _attention_cases(
    cfg: dict[str, Any], backends: tuple[str, ...]
) -> Iterator[tuple[np.ndarray, tuple[int, int], int | None, tuple[str, ...]]]:
    """Yields segments, numbers of heads, a window and backends for a config of attention.

    Windows are shorter and longer than a block of 128 keys, and heads per key and value head more
    than the 8 that the kernels of TPUs take at once.
    """
    windows = (7, 150) if cfg.get("window") else (None,)
    grouped = (cfg.get("num_kv_heads") or cfg["num_heads"]) < cfg["num_heads"]
    for window in windows:
        yield _SEGMENTS, (4, 2) if grouped else (2, 2), window, backends
    if grouped:
        yield _SEGMENTS[:1], (16, 1), windows[-1], ("xla", "tpu")
    yield _LONG, (2, 1) if grouped else (2, 2), windows[-1], ("xla",)  # Slow if interpreted.


def _compare(
    name: str, fn: Kernel, oracle: Kernel, arrays: Arrays, precision: _Precision = _SINGLE
) -> Difference | None:
    """Compares values, and gradients with finite differences of the oracle."""

    def run(operands: Any, weights: Any) -> Any:
        value, pull = jax.vjp(lambda operands: fn(**operands).astype(jnp.float32), operands)
        return value, pull(weights)[0]

    narrow = {name: x.astype(precision.dtype) for name, x in arrays.items()}
    arrays = {name: x.astype(np.float64) for name, x in narrow.items()}
    rng, want = np.random.default_rng(1), np.asarray(oracle(**arrays))
    weights = rng.standard_normal(want.shape)
    quick = {"xla_backend_optimization_level": 0}
    run = jax.jit(run, compiler_options=quick)
    value, gradients = jax.device_get(run(narrow, jnp.float32(weights)))
    if found := first_difference({name: want}, {name: value}, relative=precision.tolerance):
        return found
    for operand, x in arrays.items():
        direction = rng.standard_normal(x.shape)
        ends = (oracle(**{**arrays, operand: x + h * direction}) for h in (1e-6, -1e-6))
        expected = float(np.vdot(weights, np.subtract(*ends))) / 2e-6
        found = float(np.vdot(gradients[operand].astype(np.float64), direction))
        text = f"{name}: derivative along a direction of {operand}"
        allowed = precision.tolerance * float(np.linalg.norm(gradients[operand].astype(np.float64)))
        if found := first_difference({text: expected}, {text: found}, relative=0, floor=allowed):
            return found
    return None


_HOLD_STATE = (BiasBalancing, LoadCounter)  # Layers without outputs.


# -- Layers --------------------------------------------------------------------------------------


def layers(known: Reference) -> Difference | str | None:
    """Compares one layer of each kind with its formula, and the loss of the whole model."""
    form = Plain(known.probe.trainer, ("capacity",))
    params = tree.map_by_path(_moved_state, form.layers_apart(known.start.model))
    seen: set[str] = set()
    of_path = {f"{layer.path().replace('.', '/')}/": layer for layer, _ in form.model.walk()}
    for path, layer in form.in_order(of_path).items():
        text = layer.config.clone(name="").debug_string()
        if text in seen:
            continue
        seen.add(text)
        own = functools.reduce(lambda at, name: at.get(name, {}), path.split("/")[:-1], params)
        if found := _in_bfloat16(path[:-1], layer, own):
            return found
        if not _has_formula(layer, is_random=known.is_random):
            continue
        named = ({f"{path[:-1]}: {n}": x for n, x in each.items()} for each in _layer(layer, own))
        if found := first_difference(*named, relative=1e-6, floor=1e-9):
            return found
    if carrying := [each.path() for each, _ in form.model.walk() if carry_names(each)]:
        return f"{carrying[0]} carries values from layer to layer: the whole model has no formula"
    left_out = f"without {form.unquantized}" if form.unquantized else None
    if type(form.model) is not CausalLM or known.is_random:
        return left_out
    moe = [layer for layer, _ in known.probe.trainer.model.walk() if isinstance(layer, MoELayer)]
    if known.plain.keep and not all(capacity_of(layer.config.dispatcher) for layer in moe):
        return "which tokens are dropped is not checked: a dispatcher has no formula"
    return _model(known, form) or left_out


def _in_bfloat16(path: str, layer: Any, params: Nested) -> Difference | None:
    """Compares a norm, a rotary embedding or a router with its formula, of inputs in bfloat16.

    They compute in float32: an entry of their result is rounded once.
    """
    rng, cfg = np.random.default_rng(3), dict(layer.config.items())
    is_rope, is_router = type(layer) in formulas.FREQUENCIES, type(layer) is Router
    if not (is_rope or is_router or type(layer) in (RMSNorm, LayerNorm)):
        return None
    dims = (2, cfg["rotary_dim"] or 16) if is_rope else (cfg.get("dim") or cfg["input_dim"],)
    x = np.asarray(rng.standard_normal((2, 24, *dims)), jnp.bfloat16)
    inputs = {"x": x} | ({"mask": np.ones((2, 24), bool)} if is_router else {})
    inputs |= {"positions": np.arange(48, dtype=np.int32).reshape(2, 24)} if is_rope else {}
    run = lambda params, inputs: functional(
        layer, jax.random.key(0), params, inputs, is_training=True
    )
    options = {"xla_backend_optimization_level": 0, "xla_allow_excess_precision": False}
    got = jax.device_get(jax.jit(run, compiler_options=options)(params, inputs)[0])
    x = x.astype(np.float64)
    if is_router:
        want, got = formulas.routing(layer.config, params, x)["logits"], got.logits
    elif is_rope:
        want = formulas.rotated(layer, params, x, inputs["positions"])
    else:
        want = formulas.output(layer, params, x)
    error = (np.float64(got) - want) / np.maximum(np.abs(want), 0.1)
    text = f"{path}: relative error for inputs in bfloat16"
    pair = {text: np.zeros_like(error)}, {text: error}
    return first_difference(*pair, relative=0.0, floor=1e-4 if is_router else 1.01 * 2**-8)


def _model(known: Reference, form: Plain) -> Difference | None:
    """Compares the loss of the whole model, and the balance loss of all layers."""
    num, batch = known.config.num_microbatches, known.batches[0]
    params = form.layers_apart(known.start.model)
    parts = [{name: x[i::num] for name, x in batch.items()} for i in range(num)]
    losses, pooled = zip(
        *(formulas.model_losses(form.model, params, x) for x in parts), strict=True
    )
    tokens = [(part["segment_ids"] > 0).sum() for part in parts]
    terms, metrics = known.expected.terms, known.expected.metrics
    named = [{"loss of the model": sum(losses) / (batch["target_labels"] >= 0).sum()}]
    named += [{"loss of the model": terms["loss"]}]
    scopes = {
        dict(layer.config.items()).get("load_balance_loss") and layer.config.load_balance_loss.scope
        for layer, _ in form.model.walk()
    }
    if scopes - {None} == {BalanceScope.ALL_LAYERS}:
        name = "decoder/load_balance_loss"
        named[0][name] = np.average(pooled, weights=tokens)
        named[1][name] = metrics[name]
    return first_difference(*named, relative=1e-6)


def _has_formula(layer: Any, *, is_random: bool) -> bool:
    """Returns whether a layer is compared by itself; those around it are by the model's loss."""
    if any(carry_names(each) for each, _ in layer.walk()):
        return False  # It does not run outside of a stack.
    known = {*formulas.FORMULAS, *formulas.FREQUENCIES, FeedForwardExperts, Router, *_HOLD_STATE}
    if is_random and any(type(each) not in known for each, _ in layer.walk()):
        return False  # Perhaps one of the user's own, with random numbers.
    if type(layer) is MoELayer:
        return type(layer.experts) is FeedForwardExperts and layer.config.local_experts is None
    return type(layer) in (*formulas.FORMULAS, Router) and not isinstance(
        layer, TransformerLayer | LoopStack
    )


def _moved_state(path: str, x: np.ndarray) -> np.ndarray:
    """Returns state of balancing, which starts at 0, with random values."""
    rng = np.random.default_rng(4)
    if path.endswith("bias_balancing/bias"):
        return (0.1 * rng.standard_normal(x.shape)).astype(np.float32)
    is_count = path.endswith("load_counter/counts")
    return rng.integers(0, 9, x.shape).astype(np.float32) if is_count else x


def _layer(layer: Any, params: Nested) -> tuple[Arrays, Arrays]:
    """Returns the results of a layer, expected and found."""
    cfg, rng = dict(layer.config.items()), np.random.default_rng(2)
    x = rng.standard_normal((2, 24, cfg.get("input_dim") or cfg["dim"]))
    x[0, 2:5] = 0  # Ties.
    router = params.get("router", params).get("weight", np.zeros((0, 0)))
    if len(router) == x.shape[-1]:
        x[0, 12:] += 3 * router[:, 0]  # Most tokens go to expert 0.
    segments = np.stack([np.repeat([1, 2, 0], [9, 12, 3]), np.repeat([1, 2, 0], [2, 12, 10])])
    given = {
        "x": x,
        "ids": rng.integers(0, cfg.get("num_embeddings", 1), x.shape[:2]),
        "segment_ids": segments,
        "positions": 3 * np.stack([np.r_[:9, :12, :3], np.r_[:2, :12, :10]]),
        "mask": segments > 0,
    }
    names = inspect.signature(layer.forward).parameters
    inputs = {
        name: np.int32(v) if v.dtype == int else v for name, v in given.items() if name in names
    }
    got, losses = formulas.run(layer, params, **inputs)
    if type(layer) is Router:
        want = formulas.routing(layer.config, params, x)
        return want, {name: getattr(got, name) for name in want}
    want, found = {"output": formulas.output(layer, params, **inputs)}, {"output": got}
    if type(layer) is MoELayer and type(layer.router) is Router:
        routed = formulas.routing(layer.router.config, params["router"], x)
        expected = formulas.router_losses(layer.config, routed, segments > 0, params)
        want |= {name: value for name, value in expected.items() if name in losses}
        found |= {name: losses[name] for name in want if name in losses}
    return want, found
