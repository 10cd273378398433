"""Attention in blocks of queries: memory linear in the sequence, in plain XLA.

Only one block's scores are ever held; the backward pass computes them again from the saved
logsumexp (Dao et al., arXiv:2205.14135, algorithms 1 and 4). Keys behind a causal block's end are
cut off statically. The n = H / G query heads of a group stand in one matmul's rows:
[B, G, n * block, Dh] times [B, G, S, Dh].
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moelib.kernels.flash_attention.reference import MASKED, attention_mask

_MAX_BLOCKS = 16  # Blocks are unrolled, so each is compiled; a longer sequence has longer ones.


def attention(
    q: Float[Array, "B S H Dh"],
    k: Float[Array, "B S G Dh"],
    v: Float[Array, "B S G Dh"],
    segment_ids: Int[Array, "B S"] | None = None,
    *,
    causal: bool = True,
    scale: float,
    block: int | None = None,
) -> Float[Array, "B S H Dh"]:
    """Returns attention over whole sequences, `block` queries at a time."""
    batch, seq_len, heads, dim = q.shape
    groups = k.shape[2]
    block = block or max(64, -(-seq_len // _MAX_BLOCKS))
    grouped = q.reshape(batch, seq_len, groups, heads // groups, dim).transpose(0, 2, 3, 1, 4)
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)  # [B, G, S, Dh]
    out = _attention(grouped, k, v, segment_ids, causal, scale, block)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _attention(
    q: Float[Array, "B G n S Dh"],
    k: Float[Array, "B G S Dh"],
    v: Float[Array, "B G S Dh"],
    segments: Int[Array, "B S"] | None,
    causal: bool,
    scale: float,
    block: int,
) -> Float[Array, "B G n S Dh"]:
    return _forward(q, k, v, segments, causal, scale, block)[0]


def _forward(
    q: Array, k: Array, v: Array, segments: Array | None, causal: bool, scale: float, block: int
) -> tuple[Array, tuple]:
    outputs, sums = [], []
    for rows, keys in _blocks(q.shape[3], block, causal):
        if outputs:
            q, outputs[-1] = _in_turn(q, outputs[-1])
        scores = _scores(q[..., rows, :], k[:, :, keys], segments, rows, keys, causal, scale)
        # Far above MASKED also where all is masked: such a row attends to nothing and gives zeros.
        peak = jnp.maximum(jnp.max(scores, -1, keepdims=True), MASKED / 10)
        exp = jnp.exp(scores - peak)
        total = jnp.maximum(jnp.sum(exp, -1, keepdims=True), 1e-30)
        out = _dot(exp.astype(v.dtype), v[:, :, keys], 2) / total
        outputs.append(out.astype(v.dtype))
        sums.append(peak + jnp.log(total))
    out, lse = jnp.concatenate(outputs, 3), jnp.concatenate(sums, 3)
    return out, (q, k, v, segments, out, lse)


def _backward(causal: bool, scale: float, block: int, residuals: tuple, grad: Array) -> tuple:
    q, k, v, segments, out, lse = residuals
    inner = jnp.sum(grad.astype(jnp.float32) * out.astype(jnp.float32), -1, keepdims=True)
    grad_q = []
    grad_k, grad_v = jnp.zeros_like(k, jnp.float32), jnp.zeros_like(v, jnp.float32)
    for rows, keys in _blocks(q.shape[3], block, causal):
        q, (grad_k, grad_v) = _in_turn(q, (grad_k, grad_v))
        q_block, grad_block = q[..., rows, :], grad[..., rows, :]
        scores = _scores(q_block, k[:, :, keys], segments, rows, keys, causal, scale)
        probs = jnp.exp(scores - lse[..., rows, :])
        grad_probs = _dot(grad_block, v[:, :, keys], 3)
        grad_scores = (probs * (grad_probs - inner[..., rows, :]) * scale).astype(q.dtype)
        grad_q.append(_dot(grad_scores, k[:, :, keys], 2).astype(q.dtype))
        grad_k = grad_k.at[:, :, keys].add(_transposed_dot(grad_scores, q_block))
        grad_v = grad_v.at[:, :, keys].add(_transposed_dot(probs.astype(v.dtype), grad_block))
    return jnp.concatenate(grad_q, 3), grad_k.astype(k.dtype), grad_v.astype(v.dtype), None


_attention.defvjp(_forward, _backward)


def _in_turn(q: Array, made: Any) -> tuple[Array, Any]:
    """Returns both; what follows from q waits for what was made. XLA runs blocks side by side."""
    return jax.lax.optimization_barrier((q, made))


def _blocks(seq_len: int, block: int, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Yields the queries of each block and the keys that they may see."""
    for start in range(0, seq_len, block):
        stop = min(start + block, seq_len)
        yield slice(start, stop), slice(0, stop if causal else seq_len)


def _scores(
    q: Float[Array, "B G n Q Dh"],
    k: Float[Array, "B G K Dh"],
    segments: Int[Array, "B S"] | None,
    rows: slice,
    keys: slice,
    causal: bool,
    scale: float,
) -> Float[Array, "B G n Q K"]:
    """Returns the scores of a block in float32, MASKED where the query may not attend."""
    of_queries = None if segments is None else segments[:, rows]
    of_keys = None if segments is None else segments[:, keys]
    index = jnp.arange(rows.start, rows.stop), jnp.arange(keys.start, keys.stop)
    mask = attention_mask(*index, of_queries, of_keys, causal=causal)[:, None, None]
    scores = _dot(q, k, 3) * scale
    return jnp.where(mask, scores, MASKED)


def _dot(
    a: Float[Array, "B G n Q x"], b: Float[Array, "B G i j"], axis: int
) -> Float[Array, "B G n Q y"]:
    """Returns a b, contracted over dimension `axis` of b, in float32.

    The n heads of a group are rows of one matmul.
    """
    rows = a.reshape(*a.shape[:2], -1, a.shape[-1])
    dims = (((3,), (axis,)), ((0, 1), (0, 1)))
    out = jax.lax.dot_general(rows, b, dims, preferred_element_type=jnp.float32)
    return out.reshape(*a.shape[:-1], out.shape[-1])


def _transposed_dot(
    a: Float[Array, "B G n Q x"], b: Float[Array, "B G n Q y"]
) -> Float[Array, "B G x y"]:
    """Returns a^T b in float32, summed over the heads of a group too."""
    a, b = (t.reshape(*t.shape[:2], -1, t.shape[-1]) for t in (a, b))
    dims = (((2,), (2,)), ((0, 1), (0, 1)))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)
