"""Attention for Hopper GPUs (H100, H200): Mosaic-GPU kernels on their tensor cores.

Nothing is transposed, and only numbers of single queries are padded. The tensor cores take 16-bit
floats and sum in float32. Mosaic-GPU is imported where it is used, because that takes a second.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from moelib.core.varying import align
from moelib.kernels import hopper
from moelib.kernels.flash_attention.gpu_tiles import visits_of
from moelib.kernels.flash_attention.reference import EMPTY, MaskSpec, Positions
from moelib.kernels.hopper import SIDE

_MAX_HEAD_DIM = 256


def reason_against(q: Float[Array, "B Q H Dh"], v: Float[Array, "B K G Dv"]) -> str | None:
    """Returns why the kernels cannot take these operands and what to do, or None if they can."""
    if reason := hopper.reason_against(q.dtype):
        return reason
    for dim in (q.shape[3], v.shape[3]):
        if dim % SIDE or dim > _MAX_HEAD_DIM:
            near = min(-(-dim // SIDE) * SIDE, _MAX_HEAD_DIM)
            return (
                f"takes a head_dim that is a multiple of {SIDE} up to {_MAX_HEAD_DIM}, not {dim}; "
                f"set {near}."
            )
    return None


def forward(
    q: Float[Array, "B Q H Dh"],
    k: Float[Array, "B K G Dh"],
    v: Float[Array, "B K G Dv"],
    sinks: Float[Array, "H"] | None,
    positions: Positions,
    spec: MaskSpec,
    *,
    in_order: bool,
    interpret: Any = False,
) -> tuple[Float[Array, "B Q H Dv"], Float32[Array, "B H Q"]]:
    """Returns the attention of queries to keys, and the logsumexp; arguments as `xla.forward`."""
    from moelib.kernels.flash_attention import gpu_kernels

    call, visited = _setup(q, v, positions, spec, in_order, interpret)("outputs")
    sinks = jnp.full(q.shape[2], EMPTY) if sinks is None else sinks.astype(jnp.float32)
    visited, *operands = align(visited, *map(_padded, (q, k, v)), sinks)
    dtype = v.dtype if in_order else jnp.float32
    out, lse = gpu_kernels.outputs(call, visited, *operands, dtype=dtype)
    out, lse, _ = align(out, lse, q)
    return out[:, : q.shape[1]], lse[..., : q.shape[1]]


def backward(
    q: Float[Array, "B Q H Dh"],
    k: Float[Array, "B K G Dh"],
    v: Float[Array, "B K G Dv"],
    lse: Float32[Array, "B H Q"],
    delta: Float32[Array, "B H Q"],
    grad: Float[Array, "B Q H Dv"],
    positions: Positions,
    spec: MaskSpec,
    *,
    in_order: bool,
    interpret: Any = False,
) -> tuple[Array, Array, Array]:
    """Returns the gradients in q, k and v; arguments as `xla.backward`."""
    from moelib.kernels.flash_attention import gpu_kernels

    setup = _setup(q, v, positions, spec, in_order, interpret)
    dtypes = [x.dtype if in_order else jnp.dtype(jnp.float32) for x in (q, k, v)]
    sums = jnp.stack([lse, delta], axis=2)
    sums = jnp.pad(sums, [(0, 0)] * 3 + [(0, -q.shape[1] % 128)])  # To whole tiles.
    operands = align(*map(_padded, (q, k, v, grad)), sums)
    call, visited = setup("query_gradient")
    visited, _ = align(visited, q)
    grad_q = gpu_kernels.query_gradient(call, visited, *operands, dtype=dtypes[0])
    call, visited = setup("key_gradients")
    visited, _ = align(visited, q)
    parts = _num_parts(q, k, call.tiles.rows)
    dtype = dtypes[1] if parts == 1 else jnp.float32
    grads = gpu_kernels.key_gradients(call, visited, *operands, parts=parts, dtype=dtype)
    *grads, _ = align(grad_q, *(_summed(x, parts, dtypes[1]) for x in grads), q)
    grad_q, grad_k, grad_v = grads
    return grad_q[:, : q.shape[1]], grad_k[:, : k.shape[1]], grad_v[:, : k.shape[1]]


def _setup(
    q: Array, v: Array, positions: Positions, spec: MaskSpec, in_order: bool, interpret: Any
) -> Callable[[str], tuple[Any, Any]]:
    """Returns a function of a kernel's name: its static arguments and visits."""
    if interpret is True:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        interpret = plgpu.InterpretGPUParams()
    dims, options = (q.shape[3], v.shape[3]), {"in_order": in_order, "interpret": interpret}
    return lambda kernel: visits_of(kernel, dims, positions, spec, **options)


def _padded(x: Float[Array, "B S H D"]) -> Float[Array, "B T H D"]:
    """Returns the array with zeros after its tokens, up to a multiple of 8: a copy, of odd sizes.

    The copy engine takes rows by 8.
    """
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % 8), (0, 0), (0, 0))) if x.shape[1] % 8 else x


def _summed(x: Float[Array, "B K P D"], parts: int, dtype: Any) -> Float[Array, "B K G D"]:
    if parts == 1:
        return x
    return x.reshape(*x.shape[:2], -1, parts, x.shape[3]).sum(3).astype(dtype)


def _num_parts(q: Array, k: Array, rows: int) -> int:
    """Returns the number of parts that the heads of a group are split into.

    The fewest that give each SM two blocks of threads: under a causal mask, tiles of keys take from
    nearly none to twice the average time. The sums of parts are written, and added up by XLA.
    """
    blocks = k.shape[0] * k.shape[2] * -(-k.shape[1] // rows)
    heads = q.shape[2] // k.shape[2]
    fits = (n for n in range(1, heads + 1) if heads % n == 0 and n * blocks >= 2 * hopper.num_sms())
    return next(fits, heads)
