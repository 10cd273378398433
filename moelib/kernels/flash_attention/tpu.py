"""Attention on TPUs: layout, padding and block sizes of the Pallas kernels.

Shapes: C chunks of n heads; a chunk is the heads of a group, or a part of them if they are many.
"""

import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from moelib.core.varying import align
from moelib.kernels.flash_attention import tpu_kernels
from moelib.kernels.flash_attention.reference import MaskSpec, Positions
from moelib.kernels.flash_attention.tpu_kernels import Call, Masks
from moelib.kernels.flash_attention.visits import MAX_BLOCKS, MAX_VISITS, in_blocks, visits

_LANES = 128
_LEAST_DIM = 64
_MAX_BLOCK = 512
_MAX_ROWS = 1024  # Queries of all heads of a chunk; with 512 keys, the scores take 2 MiB.
_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))


def reason_against(
    q: Float[Array, "B Q H Dh"],
    k: Float[Array, "B K G Dh"],
    v: Float[Array, "B K G Dv"],
    spec: MaskSpec,
    *,
    in_order: bool,
) -> str | None:
    """Returns why the kernels cannot take these operands and what to do, or None if they can."""
    dim = max(q.shape[3], v.shape[3])
    if dim % 16 or dim < _LEAST_DIM:
        nearest = max(_LEAST_DIM, 16 * round(dim / 16))
        return f"takes a head_dim that is a multiple of 16 from 64 on, not {dim}; set {nearest}."
    if q.dtype not in _DTYPES:
        return f"takes bfloat16 and float32, not {q.dtype}; cast to one of them."
    call, _ = _call(q, k, spec, interpret=False, in_order=in_order)
    pairs = _num_visits(call, q, k, in_order)
    if pairs > MAX_VISITS or max(_num_blocks(call, q, k)) > MAX_BLOCKS:
        return (
            f"takes {MAX_VISITS} pairs of blocks, not the {pairs} of {q.shape[1]} queries and "
            f"{k.shape[1]} keys; split the sequence over more devices."
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
    v_dim, (q, k, v) = v.shape[3], (_of_full_tiles(x) for x in (q, k, v))
    call, chunks = _call(q, k, spec, interpret, in_order)
    out_dtype = v.dtype if in_order else jnp.dtype(jnp.float32)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(chunks, -1)
    list_, masks = _visits(call, positions, in_order, by_keys=False)
    operands = (
        _query_layout(call, chunks, q),
        _key_layout(call, k),
        _key_layout(call, v),
        sinks,
        masks,
    )
    operands = align(list_, *operands)
    out, lse = tpu_kernels.outputs(call, *operands, dtype=out_dtype)
    lse = lse.reshape(q.shape[0], q.shape[2], -1)[..., : q.shape[1]]
    return _from_query_layout(out, q)[..., :v_dim], lse


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
    dim, v_dim = q.shape[3], v.shape[3]
    q, k, v, grad = (_of_full_tiles(x) for x in (q, k, v, grad))
    call, chunks = _call(q, k, spec, interpret, in_order)
    groups = k.shape[2]
    dtypes = [x.dtype if in_order else jnp.dtype(jnp.float32) for x in (q, k, v)]
    rows = [_padded(x, call.block_q) for x in (lse, delta)]
    rows = [x.reshape(q.shape[0], chunks, -1, x.shape[2]) for x in rows]
    by_queries, masks = _visits(call, positions, in_order, by_keys=False)
    by_keys, _ = _visits(call, positions, in_order, by_keys=True)
    operands = _query_layout(call, chunks, q), _key_layout(call, k), _key_layout(call, v)
    operands = *operands, _query_layout(call, chunks, grad), *rows, masks
    by_queries, by_keys, *operands = align(by_queries, by_keys, *operands)
    run = functools.partial(tpu_kernels.gradients, call)
    (grad_q,) = run(by_queries, *operands, dtype=dtypes[0], of_keys=False)
    sums_dtype = dtypes[1] if chunks == groups else jnp.dtype(jnp.float32)
    grads = run(by_keys, *operands, dtype=sums_dtype, of_keys=True)
    grad_k, grad_v = (_from_key_layout(x, k, dtypes[1]) for x in grads)
    return _from_query_layout(grad_q, q)[..., :dim], grad_k[..., :dim], grad_v[..., :v_dim]


def _call(q: Array, k: Array, spec: MaskSpec, interpret: Any, in_order: bool) -> tuple[Call, int]:
    """Returns the block sizes, and the number of chunks of heads.

    A block is at most a quarter of the sequence, so that causality skips whole blocks; at most a
    window, or most of a block would lie outside it; and pads the sequence by at most an eighth. A
    chunk has as many heads as fit; where long sequences have too many visits, it has fewer, with
    more queries.
    """
    heads = q.shape[2] // k.shape[2]
    fit = [n for n in range(1, heads + 1) if heads % n == 0 and n * _LANES <= _MAX_ROWS]
    limit = _MAX_BLOCK if spec.window is None else min(_MAX_BLOCK, spec.window)
    block_k = _block(k.shape[1], limit)

    def with_heads(number: int) -> tuple[Call, int]:
        block_q = _block(q.shape[1], min(limit, _MAX_ROWS // number))
        return Call(spec, block_q, block_k, interpret), q.shape[2] // number

    calls = [with_heads(number) for number in reversed(fit)]
    small = (each for each in calls if _num_visits(each[0], q, k, in_order) <= MAX_VISITS)
    return next(small, calls[-1])


def _num_blocks(call: Call, q: Array, k: Array) -> tuple[int, int]:
    return -(-q.shape[1] // call.block_q), -(-k.shape[1] // call.block_k)


def _num_visits(call: Call, q: Array, k: Array, in_order: bool) -> int:
    """Returns the visits; all pairs of blocks if the order is unknown or a list has no room."""
    blocks = _num_blocks(call, q, k)
    pairs = math.prod(blocks)
    if pairs <= MAX_VISITS or not in_order or max(blocks) > MAX_BLOCKS:
        return pairs
    index = np.arange(q.shape[1], dtype=np.int32)
    rows = in_blocks(index, index, call.block_q, call.block_k)
    return len(visits(*rows, call.spec, by_keys=False))


def _block(seq_len: int, limit: int) -> int:
    size = _LANES
    while 2 * size <= limit and 8 * size <= seq_len:
        size *= 2
    least = -(-seq_len // _LANES) * _LANES
    while -(-seq_len // size) * size - least > seq_len // 8:
        size //= 2
    return size


def _visits(
    call: Call, positions: Positions, in_order: bool, *, by_keys: bool
) -> tuple[Array, Masks]:
    q_index, k_index = positions.q_index, positions.k_index
    if in_order:  # Known while tracing, so the list is too.
        q_index = k_index = np.arange(q_index.shape[0], dtype=np.int32)
    rows = in_blocks(q_index, k_index, call.block_q, call.block_k)
    found = visits(*rows, call.spec, by_keys=by_keys)
    segments = [
        None if x is None else _padded(x.astype(jnp.int32), block)[:, None]
        for x, block in (
            (positions.q_segments, call.block_q),
            (positions.k_segments, call.block_k),
        )
    ]
    q_row, k_row = (jnp.asarray(x).reshape(1, -1) for x in rows)
    return jnp.asarray(found), Masks(q_row, k_row, *segments)


def _of_full_tiles(x: Float[Array, "B S H Dh"]) -> Float[Array, "B S H d"]:
    """Returns heads of whole tiles, with zeros after them, which add nothing to scores."""
    return _padded(x, 16) if x.shape[3] > _LEAST_DIM else _padded(x, _LEAST_DIM)


def _query_layout(
    call: Call, chunks: int, x: Float[Array, "B Q H Dh"]
) -> Float[Array, "B C n Dh q"]:
    x = x.reshape(*x.shape[:2], chunks, -1, x.shape[3]).transpose(0, 2, 3, 4, 1)
    return _padded(x, call.block_q)


def _from_query_layout(
    x: Float[Array, "B C n d q"], like: Float[Array, "B Q H Dh"]
) -> Float[Array, "B Q H d"]:
    return x[..., : like.shape[1]].transpose(0, 4, 1, 2, 3).reshape(*like.shape[:3], -1)


def _key_layout(call: Call, x: Float[Array, "B K G Dh"]) -> Float[Array, "B G Dh k"]:
    return _padded(x.transpose(0, 2, 3, 1), call.block_k)


def _from_key_layout(
    x: Float[Array, "B C d k"], like: Float[Array, "B K G Dh"], dtype: Any
) -> Float[Array, "B K G d"]:
    """Returns [B, K, G, d], summed over the chunks of each group."""
    x = x.reshape(x.shape[0], like.shape[2], -1, *x.shape[2:])[..., : like.shape[1]]
    x = x[:, :, 0] if x.shape[2] == 1 else jnp.sum(x, axis=2)
    return x.transpose(0, 3, 1, 2).astype(dtype)


def _padded(x: Array, block: int) -> Array:
    """Returns the array with zeros after its last axis, up to a multiple of the block."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % block)])
