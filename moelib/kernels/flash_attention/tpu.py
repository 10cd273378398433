"""Attention on TPUs: layout, padding and block sizes around the Pallas kernels.

Shapes: C chunks of n heads; a chunk is a group's heads, or a part of them if they are many.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from moelib.core.varying import align
from moelib.kernels.flash_attention import tpu_kernels
from moelib.kernels.flash_attention.finite import poison_rows, poison_scores, zero_not_finite
from moelib.kernels.flash_attention.reference import MaskSpec, Places
from moelib.kernels.flash_attention.tpu_kernels import Call, Masks
from moelib.kernels.flash_attention.visits import MAX_BLOCKS, MAX_VISITS, PAST_END, visits

_LANES = 128
_MAX_BLOCK = 512
_MAX_ROWS = 1024  # Queries of all heads of a chunk; with 512 keys, scores of 2 MiB.
_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))


def reason_against(
    q: Float[Array, "B Q H Dh"], k: Float[Array, "B K G Dh"], spec: MaskSpec, *, in_order: bool
) -> str | None:
    """Returns why the kernels cannot take these operands and what they can, or None if they can."""
    dim = q.shape[3]
    if dim % 16 or dim < 64:
        nearest = max(64, 16 * round(dim / 16))
        return (
            f"head_dim is {dim}; the TPU kernels take multiples of 16 from 64 on, {nearest} is the "
            "nearest"
        )
    if q.dtype not in _DTYPES:
        return f"the dtype is {q.dtype}; the TPU kernels take bfloat16 and float32"
    call, _ = _call(q, k, spec, interpret=False)
    blocks = -(-q.shape[1] // call.block_q), -(-k.shape[1] // call.block_k)
    pairs = blocks[0] * blocks[1]
    if pairs > MAX_VISITS and in_order:
        index = np.arange(q.shape[1], dtype=np.int32)
        pairs = len(visits(*_in_blocks(call, index, index), spec, by_keys=False))
    if pairs > MAX_VISITS or max(blocks) > MAX_BLOCKS:
        return (
            f"{q.shape[1]} queries and {k.shape[1]} keys make {pairs} pairs of blocks; the TPU "
            f"kernels take {MAX_VISITS} pairs, so split the sequence over devices"
        )
    return None


def forward(
    q: Float[Array, "B Q H Dh"],
    k: Float[Array, "B K G Dh"],
    v: Float[Array, "B K G Dh"],
    sinks: Float[Array, "H"] | None,
    places: Places,
    spec: MaskSpec,
    *,
    in_order: bool,
    interpret: Any = False,
) -> tuple[Float[Array, "B Q H Dh"], Float32[Array, "B H Q"]]:
    """Returns the attention of queries to keys, and the logsumexp, as `xla.forward` does.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        sinks: One more score for each head, or None.
        places: Where queries and keys stand.
        spec: How scores are made.
        in_order: Whether queries and keys are the same sequence, its positions 0, 1, ...
        interpret: As for `pl.pallas_call`.
    """
    call, chunks = _call(q, k, spec, interpret)
    out_dtype = v.dtype if in_order else jnp.dtype(jnp.float32)
    q, k, v = poison_scores(q, k, v)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(chunks, -1)
    list_, masks = _visits(call, places, in_order, by_keys=False)
    operands = _of_queries(call, chunks, q), _of_keys(call, k), _of_keys(call, v), sinks, masks
    operands = align(list_, *operands)
    out, lse = tpu_kernels.outputs(call, *operands, dtype=out_dtype)
    return _whole_queries(out, q), lse.reshape(q.shape[0], q.shape[2], -1)[..., : q.shape[1]]


def backward(
    q: Float[Array, "B Q H Dh"],
    k: Float[Array, "B K G Dh"],
    v: Float[Array, "B K G Dh"],
    lse: Float32[Array, "B H Q"],
    delta: Float32[Array, "B H Q"],
    grad: Float[Array, "B Q H Dh"],
    places: Places,
    spec: MaskSpec,
    *,
    in_order: bool,
    interpret: Any = False,
) -> tuple[Array, Array, Array]:
    """Returns the gradients in q, k and v, as `xla.backward` does.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        lse: The logsumexp of all scores of each query.
        delta: The sum of output times gradient of each query.
        grad: The gradient of the output.
        places: Where queries and keys stand.
        spec: How scores are made.
        in_order: As for `forward`.
        interpret: As for `pl.pallas_call`.
    """
    call, chunks = _call(q, k, spec, interpret)
    groups = k.shape[2]
    dtypes = [x.dtype if in_order else jnp.dtype(jnp.float32) for x in (q, k, v)]
    q, k, v, grad = zero_not_finite(q, k, v, grad)
    rows = [_padded(x, call.block_q) for x in poison_rows(lse, delta)]
    rows = [x.reshape(q.shape[0], chunks, -1, x.shape[2]) for x in rows]
    by_queries, masks = _visits(call, places, in_order, by_keys=False)
    by_keys, _ = _visits(call, places, in_order, by_keys=True)
    operands = _of_queries(call, chunks, q), _of_keys(call, k), _of_keys(call, v)
    operands = *operands, _of_queries(call, chunks, grad), *rows, masks
    by_queries, by_keys, *operands = align(by_queries, by_keys, *operands)
    grad_q = tpu_kernels.query_gradients(call, by_queries, *operands, dtype=dtypes[0])
    sums_dtype = dtypes[1] if chunks == groups else jnp.dtype(jnp.float32)
    grads = tpu_kernels.key_gradients(call, by_keys, *operands, dtype=sums_dtype)
    grad_k, grad_v = (_whole_keys(x, k, dtypes[1]) for x in grads)
    return _whole_queries(grad_q, q), grad_k, grad_v


def _call(q: Array, k: Array, spec: MaskSpec, interpret: Any) -> tuple[Call, int]:
    """Returns the block sizes, and the number of chunks of heads.

    Blocks are as large as pays: a quarter of the sequence at most, so causality leaves whole blocks
    out; no more than a window, or most of a block lay outside of it; and no more padding than an
    eighth of the sequence.
    """
    heads = q.shape[2] // k.shape[2]
    fit = [n for n in range(1, heads + 1) if heads % n == 0 and n * _LANES <= _MAX_ROWS]
    limit = _MAX_BLOCK if spec.window is None else min(_MAX_BLOCK, spec.window)
    block_q = _block(q.shape[1], min(limit, _MAX_ROWS // fit[-1]))
    block_k = _block(k.shape[1], limit)
    return Call(spec, block_q, block_k, interpret), q.shape[2] // fit[-1]


def _block(seq_len: int, limit: int) -> int:
    size = _LANES
    while 2 * size <= limit and 8 * size <= seq_len:
        size *= 2
    least = -(-seq_len // _LANES) * _LANES
    while -(-seq_len // size) * size - least > seq_len // 8:
        size //= 2
    return size


def _visits(call: Call, places: Places, in_order: bool, *, by_keys: bool) -> tuple[Array, Masks]:
    q_index, k_index = places.q_index, places.k_index
    if in_order:  # Known now, so the list is too.
        q_index = k_index = np.arange(q_index.shape[0], dtype=np.int32)
    rows = _in_blocks(call, q_index, k_index)
    found = visits(*rows, call.spec, by_keys=by_keys)
    segments = [
        None if x is None else _padded(x.astype(jnp.int32), block)[:, None]
        for x, block in (
            (places.q_segments, call.block_q),
            (places.k_segments, call.block_k),
        )
    ]
    q_row, k_row = (jnp.asarray(x).reshape(1, -1) for x in rows)
    return jnp.asarray(found), Masks(q_row, k_row, *segments)


def _in_blocks(call: Call, q_index: Any, k_index: Any) -> tuple[Any, Any]:
    """Returns the positions by block, padded; NumPy arrays give NumPy arrays."""
    xp: Any = np if isinstance(q_index, np.ndarray) else jnp
    pad = lambda x, block: (0, -x.shape[0] % block)
    q_index = xp.pad(q_index, pad(q_index, call.block_q), mode="edge")
    k_index = xp.pad(k_index, pad(k_index, call.block_k), constant_values=PAST_END)
    rows = q_index.reshape(-1, call.block_q), k_index.reshape(-1, call.block_k)
    return rows[0].astype(np.int32), rows[1].astype(np.int32)


def _of_queries(call: Call, chunks: int, x: Float[Array, "B Q H Dh"]) -> Float[Array, "B C n Dh q"]:
    x = x.reshape(*x.shape[:2], chunks, -1, x.shape[3]).transpose(0, 2, 3, 4, 1)
    return _padded(x, call.block_q)


def _whole_queries(
    x: Float[Array, "B C n Dh q"], like: Float[Array, "B Q H Dh"]
) -> Float[Array, "B Q H Dh"]:
    return x[..., : like.shape[1]].transpose(0, 4, 1, 2, 3).reshape(like.shape)


def _of_keys(call: Call, x: Float[Array, "B K G Dh"]) -> Float[Array, "B G Dh k"]:
    return _padded(x.transpose(0, 2, 3, 1), call.block_k)


def _whole_keys(
    x: Float[Array, "B C Dh k"], like: Float[Array, "B K G Dh"], dtype: Any
) -> Float[Array, "B K G Dh"]:
    """Returns the sums over the chunks of each group."""
    x = x.reshape(x.shape[0], like.shape[2], -1, *x.shape[2:])[..., : like.shape[1]]
    x = x[:, :, 0] if x.shape[2] == 1 else jnp.sum(x, axis=2)
    return x.transpose(0, 3, 1, 2).astype(dtype)


def _padded(x: Array, block: int) -> Array:
    """Returns the array with zeros up to a multiple of the block behind its last axis."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % block)])
