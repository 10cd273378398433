"""Attention in blocks of queries: memory linear in the sequence, in plain XLA.

Only one block's scores are ever held; the backward pass computes them again from the saved
logsumexp (Dao et al., arXiv:2205.14135, algorithms 1 and 4). The n = H / G query heads of a group
stand in one matmul's rows: [B, G, n * block, Dh] times [B, G, S, Dh].

Blocks are visited in a loop: unrolled, XLA would compute the scores of all of them side by side.
Causal attention has one loop for each of a few parts of the sequence, and keys behind a part's end
are cut off statically.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moelib.kernels.flash_attention.reference import MASKED, attention_mask
from moelib.kernels.varying import align, zeros_like_varying

_MAX_PARTS = 8  # Each is compiled by itself; the last block of one in 8 computes what is masked.


def attention(
    q: Float[Array, "B S H Dh"],
    k: Float[Array, "B S G Dh"],
    v: Float[Array, "B S G Dh"],
    segment_ids: Int[Array, "B S"] | None = None,
    *,
    causal: bool = True,
    scale: float,
    block: int = 64,
) -> Float[Array, "B S H Dh"]:
    """Returns attention over whole sequences, `block` queries at a time."""
    batch, seq_len, heads, dim = q.shape
    groups = k.shape[2]
    q, k, v = align(q, k, v)
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
    def step(carry: tuple[Array, Array], start: Any, size: int, keys: int) -> tuple[Array, Array]:
        out, lse = carry
        scores = _scores(q, k, segments, start, size, keys, causal, scale)
        # Far above MASKED also where all is masked: such a row attends to nothing and gives zeros.
        peak = jnp.maximum(jnp.max(scores, -1, keepdims=True), MASKED / 10)
        exp = jnp.exp(scores - peak)
        total = jnp.maximum(jnp.sum(exp, -1, keepdims=True), 1e-30)
        made = _dot(exp.astype(v.dtype), v[:, :, :keys], 2) / total
        return _put(out, made, start), _put(lse, peak + jnp.log(total), start)

    sums = (*q.shape[:-1], 1)
    carry = zeros_like_varying(q.shape, v.dtype, q), zeros_like_varying(sums, jnp.float32, q)
    out, lse = _over_blocks(step, carry, q.shape[3], block, causal)
    return out, (q, k, v, segments, out, lse)


def _backward(causal: bool, scale: float, block: int, residuals: tuple, grad: Array) -> tuple:
    q, k, v, segments, out, lse = residuals
    inner = jnp.sum(grad.astype(jnp.float32) * out.astype(jnp.float32), -1, keepdims=True)

    def step(carry: tuple[Array, ...], start: Any, size: int, keys: int) -> tuple[Array, ...]:
        grad_q, grad_k, grad_v = carry
        q_block, grad_block, lse_block, inner_block = (
            _rows(x, start, size) for x in (q, grad, lse, inner)
        )
        scores = _scores(q, k, segments, start, size, keys, causal, scale)
        probs = jnp.exp(scores - lse_block)
        grad_probs = _dot(grad_block, v[:, :, :keys], 3)
        grad_scores = (probs * (grad_probs - inner_block) * scale).astype(q.dtype)
        grad_q = _put(grad_q, _dot(grad_scores, k[:, :, :keys], 2), start)
        grad_k = grad_k.at[:, :, :keys].add(_transposed_dot(grad_scores, q_block))
        grad_v = grad_v.at[:, :, :keys].add(_transposed_dot(probs.astype(v.dtype), grad_block))
        return grad_q, grad_k, grad_v

    zeros = [(q.shape, q.dtype), (k.shape, jnp.float32), (v.shape, jnp.float32)]
    carry = tuple(zeros_like_varying(shape, dtype, q) for shape, dtype in zeros)
    grad_q, grad_k, grad_v = _over_blocks(step, carry, q.shape[3], block, causal)
    return grad_q, grad_k.astype(k.dtype), grad_v.astype(v.dtype), None


_attention.defvjp(_forward, _backward)


def _over_blocks(
    step: Callable[[Any, Any, int, int], Any], carry: Any, seq_len: int, block: int, causal: bool
) -> Any:
    """Folds `step(carry, first query, queries, keys that they may see)` over blocks of queries."""
    for start, stop in _parts(seq_len, block):
        keys = stop if causal else seq_len
        if stop - start <= block:
            carry = step(carry, start, stop - start, keys)
        else:
            turn = lambda i, carry, start=start, keys=keys: step(
                carry, start + i * block, block, keys
            )
            carry = lax.fori_loop(0, (stop - start) // block, turn, carry)
    return carry


def _parts(seq_len: int, block: int) -> Iterator[tuple[int, int]]:
    """Yields (start, stop) of parts that are multiples of the block, or less than one."""
    whole = seq_len - seq_len % block
    size = block * max(1, -(-whole // (block * _MAX_PARTS)))
    for start in range(0, whole, size):
        yield start, min(start + size, whole)
    if whole < seq_len:
        yield whole, seq_len


def _rows(x: Float[Array, "B G n S x"], start: Any, size: int) -> Float[Array, "B G n Q x"]:
    return lax.dynamic_slice_in_dim(x, start, size, axis=3)


def _put(x: Float[Array, "B G n S x"], rows: Array, start: Any) -> Float[Array, "B G n S x"]:
    return lax.dynamic_update_slice_in_dim(x, rows.astype(x.dtype), start, axis=3)


def _scores(
    q: Float[Array, "B G n S Dh"],
    k: Float[Array, "B G S Dh"],
    segments: Int[Array, "B S"] | None,
    start: Any,
    size: int,
    keys: int,
    causal: bool,
    scale: float,
) -> Float[Array, "B G n Q K"]:
    """Returns the scores of a block in float32, MASKED where the query may not attend."""
    of_queries, of_keys = None, None
    if segments is not None:
        of_queries = lax.dynamic_slice_in_dim(segments, start, size, axis=1)
        of_keys = segments[:, :keys]
    index = start + jnp.arange(size), jnp.arange(keys)
    mask = attention_mask(*index, of_queries, of_keys, causal=causal)[:, None, None]
    scores = _dot(_rows(q, start, size), k[:, :, :keys], 3) * scale
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
