"""Comparison of a kernel's call with its definition, values and gradients, on this device.

Kernels are tested where they are developed, most of them in an interpreter. A wrong result on the
hardware at hand would train a wrong model without an error, so each call that a program makes is
compared at its own shapes, with drawn operands. The definition is in float32, and computed head by
head or group by group, so that it needs little more memory than the call.

Letters: B sequences, S tokens, H query heads, G key and value heads, m rows, g groups.
"""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moelib.core.errors import UserError
from moelib.kernels.backend import Call, kernel_backends, traced_backends
from moelib.kernels.flash_attention import MaskSpec, Positions, flash_attention, passes, reference
from moelib.kernels.gmm import gmm, gmm_activated
from moelib.kernels.quantized_matmul import TILES, quantize, quantized_matmul

# Largest difference, as a share of the largest reference value. Rounding of bfloat16 operands and
# results stays below 2^-7; a wrong mask, group or sum is far above.
TOLERANCE = 2**-5

# Reference attention is differentiated with some six arrays of a head's float32 scores.
_SCORE_ARRAYS = 6


_logger = logging.getLogger(__name__)


class Comparison(NamedTuple):
    """Outcome of a comparison."""

    difference: str | None  # The largest difference beyond the tolerance; None if there is none.
    shortened: str | None = None  # Shape that was compared instead, if the reference is too large.


def backend_of(call: Call) -> str:
    """Returns the backend that computes a call on the first local device.

    Raises:
        UserError: If the backend that is chosen cannot compute it.
    """
    run, _ = _FORMS[call.entry](call)
    with jax.set_mesh(_mesh()), kernel_backends():
        shapes = {n: jax.ShapeDtypeStruct(shape, dtype) for n, shape, dtype in call.operands}
        try:
            jax.eval_shape(run, shapes)
        except UserError:
            raise
        except Exception:  # A fault of the kernel, which `compare` raises again.
            _logger.debug("%s", call, exc_info=True)
        return traced_backends()[call.kernel]


def compare(call: Call) -> Comparison:
    """Compares a call on the first local device, by its backend, with its definition."""
    mesh = _mesh()
    call, shortened = _shortened(call, _memory(mesh.devices.flat[0]))
    run, define = _FORMS[call.entry](call)
    with jax.set_mesh(mesh), kernel_backends():
        arrays = _drawn(call, NamedSharding(mesh, PartitionSpec()))
        got = _value_and_gradients(run, arrays)
        with kernel_backends({call.kernel: "reference"}), jax.default_matmul_precision("highest"):
            want = _value_and_gradients(define, arrays)
        differences = (_difference(name, got[name], want[name]) for name in got)
        return Comparison(next(filter(None, differences), None), shortened)


def _mesh() -> Mesh:
    return Mesh(np.array(jax.local_devices()[:1]), ("kernel_check",))


# -- Operands --------------------------------------------------------------------------------------


def _memory(device: jax.Device) -> float:
    """Returns the bytes that a reference may take."""
    return 0.5 * (device.memory_stats() or {}).get("bytes_limit", 8 * 2**30)


def _shortened(call: Call, memory: float) -> tuple[Call, str | None]:
    """Returns the call with sequences for whose scores there is memory, and their length if less.

    Other references take as much memory as their calls.
    """
    if call.entry != "flash_attention":
        return call, None
    length = max(shape[1] for name, shape, _ in call.operands if name != "sinks")
    new = length
    while new > 128 and _SCORE_ARRAYS * 4 * new**2 > memory:
        new //= 2
    if new == length:
        return call, None
    cut = lambda name, shape: shape if name == "sinks" else (shape[0], new, *shape[2:])
    operands = tuple((name, cut(name, shape), dtype) for name, shape, dtype in call.operands)
    return call._replace(operands=operands), f"{new} of {length} tokens"


def _drawn(call: Call, sharding: NamedSharding) -> dict[str, jax.Array]:
    """Returns operands: normal floats, groups of uneven sizes, documents of uneven lengths."""
    shapes = {name: shape for name, shape, _ in call.operands}
    arrays: dict[str, jax.Array] = {}
    for index, (name, shape, dtype) in enumerate(call.operands):
        if jnp.issubdtype(dtype, jnp.floating):
            scale = shape[-2] ** -0.5 if name in ("rhs", "weight") else 1.0
            draw = jax.jit(jax.random.normal, static_argnums=(1, 2), out_shardings=sharding)
            x = draw(jax.random.key(index), shape, jnp.dtype(dtype))
            arrays[name] = x * jnp.asarray(scale, dtype)
        else:
            grouped = name == "group_sizes"
            x = _group_sizes(shape[0], shapes["lhs"][0]) if grouped else _documents(*shape)
            arrays[name] = jax.device_put(x.astype(dtype), sharding)
    return arrays


def _group_sizes(num_groups: int, num_rows: int) -> np.ndarray:
    """Returns uneven sizes: a group without rows, and a few rows of no group."""
    rng = np.random.default_rng(0)
    share = rng.dirichlet(np.full(num_groups, 2.0))
    if num_groups > 2:
        share[1] = 0
    return np.floor(0.95 * num_rows * share / share.sum()).astype(np.int64)


def _documents(num_sequences: int, length: int) -> np.ndarray:
    """Returns segment ids of packed documents, with padding, which has the id 0, at the ends."""
    rng = np.random.default_rng(0)
    ids = 1 + np.cumsum(rng.random((num_sequences, length)) < 4 / length, axis=1)
    ids[:, length - length // 16 :] = 0
    return ids


# -- Calls and their definitions -------------------------------------------------------------------

_Function = Callable[[Mapping[str, Any]], jax.Array]


def _grouped(call: Call) -> tuple[_Function, _Function]:
    (activation,) = call.options

    def run(x: Mapping[str, Any]) -> jax.Array:
        if activation is None:
            bias = x["bias"][:, 0] if "bias" in x else None
            return gmm(x["lhs"], x["rhs"][:, 0], x["group_sizes"], bias=bias)
        return gmm_activated(
            x["lhs"], x["rhs"], x["group_sizes"], activation=activation, bias=x.get("bias")
        )

    def define(x: Mapping[str, Any]) -> jax.Array:
        lhs, ends = x["lhs"].astype(jnp.float32), jnp.cumsum(x["group_sizes"])
        rows = jnp.arange(len(lhs))[:, None]

        @jax.checkpoint
        def add(total: jax.Array, group: Any) -> tuple[jax.Array, None]:
            rhs, bias, first, end = group
            products = jnp.einsum("mk,pkn->pmn", lhs, rhs.astype(jnp.float32))
            if bias is not None:
                products += bias.astype(jnp.float32)[:, None]
            out = products[0] if activation is None else activation(*products)
            return total + jnp.where((rows >= first) & (rows < end), out, 0), None

        start = jnp.zeros((len(lhs), x["rhs"].shape[-1]), jnp.float32)
        groups = x["rhs"], x.get("bias"), ends - x["group_sizes"], ends
        return jax.lax.scan(add, start, groups)[0].astype(x["lhs"].dtype)

    return run, define


def _attention(call: Call) -> tuple[_Function, _Function]:
    (spec,) = call.options

    def run(x: Mapping[str, Any]) -> jax.Array:
        segments, sinks = x.get("segment_ids"), x.get("sinks")
        return flash_attention(x["q"], x["k"], x["v"], spec, segment_ids=segments, sinks=sinks)

    return run, lambda x: _by_head(x, spec)


def _by_head(x: Mapping[str, Any], spec: MaskSpec) -> jax.Array:
    """Returns reference attention in the dtype of v, one head of one sequence after the other."""
    batch, length, heads, _ = x["q"].shape

    def in_heads(name: str) -> jax.Array:  # [H * B, 1, S, 1, D]
        full = jnp.repeat(x[name].astype(jnp.float32), heads // x[name].shape[2], axis=2)
        return full.transpose(2, 0, 1, 3).reshape(-1, 1, length, 1, full.shape[-1])

    sinks, segments = x.get("sinks"), x.get("segment_ids")
    if sinks is not None:
        sinks = jnp.repeat(sinks, batch)[:, None]
    if segments is not None:
        segments = jnp.tile(segments, (heads, 1))[:, None]

    @jax.checkpoint
    def one(operands: Any) -> jax.Array:
        return reference.attention(*operands, spec=spec)

    out = jax.lax.map(one, (*map(in_heads, "qkv"), sinks, segments))
    out = out.reshape(heads, batch, length, -1).transpose(1, 2, 0, 3)
    return out.astype(x["v"].dtype)


def _shards(call: Call) -> tuple[_Function, _Function]:
    """The forward and the backward pass of a shard of queries in zigzag, and one of keys.

    The definition is that of plain XLA in float32.
    """
    (spec,) = call.options

    def run(x: Mapping[str, Any], backend: str | None = None) -> jax.Array:
        num_q, num_k = x["q"].shape[1], x["k"].shape[1]
        half, index = num_q // 2, jnp.arange(num_q, dtype=jnp.int32)
        positions = Positions(
            jnp.where(index < half, index, index + num_k),
            jnp.arange(num_k, dtype=jnp.int32) + half,
            x.get("q_segments"),
            x.get("k_segments"),
        )

        @jax.custom_vjp
        def attend(q: Any, k: Any, v: Any) -> jax.Array:
            return passes.attention_forward(q, k, v, positions, spec, backend=backend)[0]

        def forward(q: Any, k: Any, v: Any) -> Any:
            out, lse = passes.attention_forward(q, k, v, positions, spec, backend=backend)
            return out, (q, k, v, out, lse)

        def backward(saved: Any, grad: jax.Array) -> Any:
            q, k, v, out, lse = saved
            grads = passes.attention_backward(
                q, k, v, out, lse, grad, positions, spec, backend=backend
            )
            return tuple(g.astype(q.dtype) for g in grads)

        attend.defvjp(forward, backward)
        return attend(x["q"], x["k"], x["v"])

    def define(x: Mapping[str, Any]) -> jax.Array:
        wide = {name: x[name].astype(jnp.float32) for name in "qkv"}
        return run({**x, **wide}, "xla")

    return run, define


def _quantized(call: Call) -> tuple[_Function, _Function]:
    (scheme,) = call.options

    def run(x: Mapping[str, Any]) -> jax.Array:
        weight = quantize(jax.lax.stop_gradient(x["weight"]), TILES, scheme)
        return quantized_matmul(x["x"], weight, x["weight"])

    return run, run  # The definition is a backend.


_FORMS: dict[str, Callable[[Call], tuple[_Function, _Function]]] = {
    "gmm": _grouped,
    "gmm_activated": _grouped,
    "flash_attention": _attention,
    "attention_forward": _shards,
    "quantized_matmul": _quantized,
}


# -- Values and gradients --------------------------------------------------------------------------


def _value_and_gradients(function: _Function, arrays: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Returns the value of a function, and its gradients by array, weighted by a fixed wave."""
    floats = {n: x for n, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    others = {n: x for n, x in arrays.items() if n not in floats}

    @jax.jit
    def run(floats: Any, others: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        value, pull = jax.vjp(lambda floats: function({**floats, **others}), floats)
        wave = jnp.cos(jnp.arange(value.size, dtype=jnp.float32)).reshape(value.shape)
        return value, pull(wave.astype(value.dtype))[0]

    value, gradients = run(floats, others)
    return {"value": value, **{f"gradient of {name}": x for name, x in gradients.items()}}


@jax.jit
def _farthest(got: jax.Array, want: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the flat index of the largest excess over the tolerance, both values, the bound."""
    got, want = (x.astype(jnp.float32).reshape(-1) for x in (got, want))
    bound = TOLERANCE * jnp.max(jnp.abs(want))
    difference = jnp.abs(got - want)
    excess = jnp.where(difference <= bound, -1.0, jnp.nan_to_num(difference, nan=jnp.inf))
    index = jnp.argmax(excess)
    return index, got[index], want[index], bound, excess[index] >= 0


def _difference(name: str, got: jax.Array, want: jax.Array) -> str | None:
    index, ours, right, bound, is_wrong = (np.asarray(x) for x in _farthest(got, want))
    if not is_wrong:
        return None
    at = list(map(int, np.unravel_index(index, got.shape))) if math.prod(got.shape) else []
    return f"its {name} at {at} is {ours:.6g}, the reference's {right:.6g} (tolerance {bound:.3g})"
