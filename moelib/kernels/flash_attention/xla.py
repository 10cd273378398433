"""Attention in blocks of queries: memory linear in the sequence, in plain XLA.

Only one block's scores are ever held; the backward pass recomputes them from the saved logsumexp
(Dao et al., arXiv:2205.14135, algorithms 1 and 4). The n = H / G query heads of a group are rows of
one matmul: [B, G, n * block, Dh] times [B, G, keys, Dh].

Blocks are visited in loops: unrolled, XLA would compute the scores of all of them at once. The keys
that a block meets are known statically when queries and keys are one sequence in order: a causal
one has one loop for each of a few parts, and keys behind a part's end are cut off; with a window
every block meets a slice of block + window - 1 keys. For shards in any order keys come in tiles,
and a tile that a block cannot see is skipped at run time.

Shapes: n heads per group; q queries of a block, k keys that they meet.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32

from moelib.core.varying import align, zeros_like_varying
from moelib.kernels.flash_attention.reference import (
    EMPTY,
    MASKED,
    MaskSpec,
    Positions,
    attention_mask,
    capped,
)

_BLOCK = 64  # Queries of a block.
_MAX_PARTS = 8  # Each is compiled by itself; with more, fewer scores are masked.
_KEY_TILE = 1024  # Keys of a tile, for shards in any order.


def forward(
    q: Float[Array, "B Q H Dh"],
    k: Float[Array, "B K G Dh"],
    v: Float[Array, "B K G Dv"],
    sinks: Float[Array, "H"] | None,
    positions: Positions,
    spec: MaskSpec,
    *,
    in_order: bool,
) -> tuple[Float[Array, "B Q H Dv"], Float32[Array, "B H Q"]]:
    """Returns the attention of queries to keys, and the logsumexp of each query's scores.

    With `in_order`, queries and keys are of one sequence, with the positions 0, 1, ...
    """
    q, k, v, sinks, positions = align(q, k, v, sinks, positions)
    groups = k.shape[2]
    rows, k, v = _grouped(q, groups), k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    start = EMPTY if sinks is None else sinks.astype(jnp.float32).reshape(1, groups, -1, 1, 1)
    out_dtype = v.dtype if in_order else jnp.float32  # In order, each row is written once.
    out = zeros_like_varying((*rows.shape[:-1], v.shape[3]), out_dtype, q)
    lse = zeros_like_varying((*rows.shape[:-1], 1), jnp.float32, q) + start

    def step(carry: tuple[Array, Array], at: _Block) -> tuple[Array, Array]:
        out, lse = carry
        scores, mask = _scores(rows, k, positions, at, spec)
        scores = jnp.where(mask, scores, MASKED)
        before = at.queries(lse)
        peak = jnp.maximum(jnp.max(scores, -1, keepdims=True), before)
        exp, old = jnp.exp(scores - peak), jnp.exp(before - peak)
        total = old + jnp.sum(exp, -1, keepdims=True)
        result = _dot(exp.astype(v.dtype), at.keys(v), 2) + old * at.queries(out).astype(old.dtype)
        return at.put(out, result / total), at.put(lse, peak + jnp.log(total))

    out, lse = _over_blocks(step, (out, lse), positions, spec, in_order)
    out = out.transpose(0, 3, 1, 2, 4).reshape(*q.shape[:3], -1)
    out = out.astype(v.dtype if in_order else out.dtype)
    return out, lse.reshape(q.shape[0], q.shape[2], q.shape[1])


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
) -> tuple[Array, Array, Array]:
    """Returns the gradients in q, k and v, for these keys' share of each query's softmax.

    They are of the operands' dtypes when in order, else float32, to be summed further. `lse` is the
    logsumexp of all scores of each query, those of other keys and of sinks included; `delta` is the
    sum of output times gradient; the rest is as for `forward`.
    """
    q, k, v, lse, delta, grad, positions = align(q, k, v, lse, delta, grad, positions)
    # Without the barrier, XLA may recompute the scores of every layer before the gradient is there.
    q, grad = lax.optimization_barrier((q, grad))
    groups = k.shape[2]
    dtypes = [x.dtype if in_order else jnp.dtype(jnp.float32) for x in (q, k, v)]
    shape = q.shape
    q, grad = _grouped(q, groups), _grouped(grad, groups)
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    lse, delta = lse.reshape(*q.shape[:-1], 1), delta.reshape(*q.shape[:-1], 1)

    def step(carry: tuple[Array, ...], at: _Block) -> tuple[Array, ...]:
        grad_q, grad_k, grad_v = carry
        scores, mask = _scores(q, k, positions, at, spec)
        probs = jnp.where(mask, jnp.exp(scores - at.queries(lse)), 0.0)
        rows = at.queries(grad)
        grad_scores = probs * (_dot(rows, at.keys(v), 3) - at.queries(delta)) * spec.scale
        if spec.logit_cap is not None:
            grad_scores = grad_scores * (1 - jnp.square(scores / spec.logit_cap))
        grad_scores = grad_scores.astype(q.dtype)
        result = _dot(grad_scores, at.keys(k), 2)
        result = result + at.queries(grad_q).astype(result.dtype)
        grad_q = at.put(grad_q, result)
        grad_k = at.add(grad_k, _transposed_dot(grad_scores, at.queries(q)))
        grad_v = at.add(grad_v, _transposed_dot(probs.astype(v.dtype), rows))
        return grad_q, grad_k, grad_v

    sums: list[tuple[Array, DTypeLike]] = [(q, dtypes[0]), (k, jnp.float32), (v, jnp.float32)]
    carry = tuple(zeros_like_varying(x.shape, dtype, q) for x, dtype in sums)
    grad_q, grad_k, grad_v = _over_blocks(step, carry, positions, spec, in_order)
    grad_q = grad_q.transpose(0, 3, 1, 2, 4).reshape(shape)
    grad_k, grad_v = (x.transpose(0, 2, 1, 3) for x in (grad_k, grad_v))
    return grad_q, grad_k.astype(dtypes[1]), grad_v.astype(dtypes[2])


class _Block(NamedTuple):
    """A block of queries and the keys that they meet."""

    start: Any  # First query.
    size: int  # Number of queries.
    first: Any  # First key.
    span: int  # Number of keys.

    def queries(self, x: Float[Array, "B G n Q x"]) -> Float[Array, "B G n q x"]:
        return lax.dynamic_slice_in_dim(x, self.start, self.size, axis=3)

    def put(self, x: Float[Array, "B G n Q x"], rows: Array) -> Float[Array, "B G n Q x"]:
        return lax.dynamic_update_slice_in_dim(x, rows.astype(x.dtype), self.start, axis=3)

    def keys(self, x: Float[Array, "B G K x"]) -> Float[Array, "B G k x"]:
        return lax.dynamic_slice_in_dim(x, self.first, self.span, axis=2)

    def add(self, x: Float[Array, "B G K x"], rows: Array) -> Float[Array, "B G K x"]:
        return lax.dynamic_update_slice_in_dim(x, self.keys(x) + rows, self.first, axis=2)

    def positions(self, positions: Positions) -> Positions:
        slices = [(self.start, self.size), (self.first, self.span)] * 2  # As in `Positions`.
        cut: Any = (
            None if x is None else lax.dynamic_slice_in_dim(x, *at, axis=-1)
            for x, at in zip(positions, slices, strict=True)
        )
        return Positions(*cut)


def _over_blocks(
    step: Callable[[Any, _Block], Any],
    carry: Any,
    positions: Positions,
    spec: MaskSpec,
    in_order: bool,
) -> Any:
    """Folds `step` over blocks of queries and the keys that they may see."""
    queries, keys = positions.q_index.shape[0], positions.k_index.shape[0]
    if in_order:
        return _over_parts(step, carry, queries, spec)

    def if_seen(carry: Any, at: _Block) -> Any:
        seen = _may_see(at.positions(positions), spec)
        return lax.cond(seen, lambda carry: step(carry, at), lambda carry: carry, carry)

    for first in range(0, keys, _KEY_TILE):
        span = min(_KEY_TILE, keys - first)
        for start, stop in _parts(queries, 1):
            size = min(_BLOCK, stop - start)
            carry = _loop(if_seen, carry, start, stop, size, lambda _, first=first: first, span)
    return carry


def _over_parts(
    step: Callable[[Any, _Block], Any], carry: Any, seq_len: int, spec: MaskSpec
) -> Any:
    window = spec.window if spec.window is not None and spec.window + _BLOCK <= seq_len else None
    for start, stop in _parts(seq_len, _MAX_PARTS if window is None else 1):
        size = min(_BLOCK, stop - start)
        span, first = stop if spec.causal else seq_len, lambda _: 0
        if window is not None:
            span = window + size - 1
            first = lambda query, size=size, span=span: jnp.maximum(query + size - span, 0)
        carry = _loop(step, carry, start, stop, size, first, span)
    return carry


def _loop(
    step: Callable[[Any, _Block], Any],
    carry: Any,
    start: int,
    stop: int,
    size: int,
    first: Callable[[Any], Any],
    span: int,
) -> Any:
    """Folds `step` over the blocks of `size` queries from start to stop.

    It is a while loop, into which remat policies do not see: one that saves the results of matmuls
    would save all scores.
    """
    visit = lambda query, carry: step(carry, _Block(query, size, first(query), span))
    if stop - start == size:
        return visit(start, carry)
    count = (stop - start) // size
    body = lambda at: (at[0] + 1, visit(start + at[0] * size, at[1]))
    return lax.while_loop(lambda at: at[0] < count, body, (jnp.int32(0), carry))[1]


def _parts(seq_len: int, count: int) -> Iterator[tuple[int, int]]:
    """Yields (start, stop) of at most `count` parts, multiples of the block, and of the rest.

    The rest is less than a block.
    """
    whole = seq_len - seq_len % _BLOCK
    size = _BLOCK * max(1, -(-whole // (_BLOCK * count)))
    for start in range(0, whole, size):
        yield start, min(start + size, whole)
    if whole < seq_len:
        yield whole, seq_len


def _may_see(positions: Positions, spec: MaskSpec) -> Bool[Array, ""]:
    """Returns whether a query may see a key, by the lowest and the highest of their positions."""
    q_index, k_index = positions.q_index, positions.k_index
    seen = jnp.max(q_index) >= jnp.min(k_index) if spec.causal else jnp.full((), True)
    if spec.window is not None:
        seen = seen & (jnp.min(q_index) - jnp.max(k_index) < spec.window)
    return seen


def _scores(
    q: Float[Array, "B G n Q Dh"],
    k: Float[Array, "B G K Dh"],
    positions: Positions,
    at: _Block,
    spec: MaskSpec,
) -> tuple[Float32[Array, "B G n q k"], Bool[Array, "b 1 1 q k"]]:
    """Returns the scores of a block, and whether its queries may attend to its keys."""
    mask = attention_mask(at.positions(positions), spec)[:, None, None]
    return capped(_dot(at.queries(q), at.keys(k), 3) * spec.scale, spec), mask


def _grouped(x: Float[Array, "B Q H Dh"], groups: int) -> Float[Array, "B G n Q Dh"]:
    batch, queries, heads, dim = x.shape
    return x.reshape(batch, queries, groups, heads // groups, dim).transpose(0, 2, 3, 1, 4)


def _dot(
    a: Float[Array, "B G n q x"], b: Float[Array, "B G i j"], axis: int
) -> Float32[Array, "B G n q y"]:
    """Returns a b, contracted over dimension `axis` of b, in float32.

    The n heads of a group are rows of one matmul.
    """
    rows = a.reshape(*a.shape[:2], -1, a.shape[-1])
    dims = (((3,), (axis,)), ((0, 1), (0, 1)))
    out = lax.dot_general(rows, b, dims, preferred_element_type=jnp.float32)
    return out.reshape(*a.shape[:-1], out.shape[-1])


def _transposed_dot(
    a: Float[Array, "B G n q x"], b: Float[Array, "B G n q y"]
) -> Float32[Array, "B G x y"]:
    """Returns a^T b in float32, summed over the heads of a group."""
    a, b = (t.reshape(*t.shape[:2], -1, t.shape[-1]) for t in (a, b))
    dims = (((2,), (2,)), ((0, 1), (0, 1)))
    return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)
