"""The Pallas TPU kernels of attention: outputs, gradients of queries, gradients of keys and values.

All arrays have the sequence last, and scores are [keys, queries]. The sequence then fills the lanes
at any head_dim, the maximum, sum and logsumexp of queries are one row, and maxima and sums over
keys run over sublanes, the fast direction. The queries of the n heads that share keys are columns
of one matmul, so keys are loaded once for all of them.

Each kernel runs over a list of visits (see `visits`); masks are computed only in visits with keys
that some query does not see.

Shapes: C chunks of n heads, a group or a part of one; q queries and k keys of a block, r = n q.

Source: Dao et al., arXiv:2205.14135 and Dao, arXiv:2307.08691.
"""

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int, Int32

from moelib.core.varying import struct_like_varying
from moelib.kernels.flash_attention.reference import EMPTY, MASKED, MaskSpec, capped
from moelib.kernels.flash_attention.visits import (
    column,
    is_first,
    is_last,
    is_seen,
    is_whole,
    least_ahead,
    row,
)

_VMEM_LIMIT = 48 * 2**20  # VMEM has 64 MiB on tpu7x, 128 MiB on other chips.


class Masks(NamedTuple):
    """Positions, and segments or None."""

    q_index: Int32[Array, "1 Q"]
    k_index: Int32[Array, "1 K"]
    q_segments: Int32[Array, "B 1 Q"] | None
    k_segments: Int32[Array, "B 1 K"] | None


class Call(NamedTuple):
    """Static arguments of all kernels. Hashable."""

    spec: MaskSpec
    block_q: int
    block_k: int
    interpret: Any  # As for `pl.pallas_call`.


def outputs(
    call: Call,
    visits: Int[Array, "V"],
    q: Float[Array, "B C n Dh Q"],
    k: Float[Array, "B G Dh K"],
    v: Float[Array, "B G Dv K"],
    sinks: Float32[Array, "C n"] | None,
    masks: Masks,
    *,
    dtype: DTypeLike,
) -> tuple[Float[Array, "B C n Dv Q"], Float32[Array, "B C n Q"]]:
    """Returns attention and logsumexp of each query; a visit's row is a block of queries."""
    (*shape, dim, length), v_dim = q.shape, v.shape[2]
    specs = _Specs(call, q, k, row, column)
    rows = q.shape[2] * call.block_q
    out = (*shape, v_dim, length), dtype, specs.q(v_dim)
    return _pallas_call(
        functools.partial(_outputs_kernel, call),
        call,
        "attention",
        visits,
        operands=(
            (q, specs.q(dim)),
            (k, specs.k(dim)),
            (v, specs.k(v_dim)),
            *specs.of_masks(masks),
        ),
        scalars=sinks,
        results=(out, ((*shape, length), jnp.float32, specs.sums)),
        scratch=((1, rows), (1, rows), (v_dim, rows)),
        inner_dims=dim + v_dim,
    )


def gradients(
    call: Call,
    visits: Int[Array, "V"],
    q: Float[Array, "B C n Dh Q"],
    k: Float[Array, "B G Dh K"],
    v: Float[Array, "B G Dv K"],
    grad: Float[Array, "B C n Dv Q"],
    lse: Float32[Array, "B C n Q"],
    delta: Float32[Array, "B C n Q"],
    masks: Masks,
    *,
    dtype: DTypeLike,
    of_keys: bool,
) -> tuple[Array, ...]:
    """Returns the gradient in the queries, or with `of_keys` each chunk's in keys and in values.

    A visit's row is a block of queries, or with `of_keys` of keys.
    """
    specs = _Specs(call, q, k, *((column, row) if of_keys else (row, column)))
    dim, v_dim = k.shape[2], v.shape[2]
    arrays = (q, specs.q(dim)), (k, specs.k(dim)), (v, specs.k(v_dim)), (grad, specs.q(v_dim))
    if of_keys:
        results = [((*q.shape[:2], d, k.shape[3]), dtype, specs.k_sums(d)) for d in (dim, v_dim)]
        scratch = (dim, call.block_k), (v_dim, call.block_k)
    else:
        results = [(q.shape, dtype, specs.q(dim))]
        scratch = ((dim, q.shape[2] * call.block_q),)
    return _pallas_call(
        functools.partial(_gradients_kernel, call, of_keys),
        call,
        f"attention_{'key' if of_keys else 'query'}_gradient",
        visits,
        operands=(*arrays, (lse, specs.sums), (delta, specs.sums), *specs.of_masks(masks)),
        scalars=None,
        results=results,
        scratch=scratch,
        inner_dims=2 * dim + (2 if of_keys else 1) * v_dim,
    )


def _outputs_kernel(
    call: Call, visits: Any, refs: Any, sinks: Any, results: Any, scratch: Any
) -> None:
    q, k, v, *masks = refs
    out, lse = results
    peak, total, acc = scratch
    chunk, visit, heads = pl.program_id(1), visits[pl.program_id(2)], q.shape[0]

    @pl.when(is_first(visit))
    def _() -> None:
        start = [EMPTY if sinks is None else sinks[chunk, i] for i in range(heads)]
        peak[...] = _side_by_side([jnp.full((1, call.block_q), x, jnp.float32) for x in start])
        total[...] = jnp.ones_like(total)  # The sink's own share; that of EMPTY vanishes.
        acc[...] = jnp.zeros_like(acc)

    def accumulate(masked: bool) -> None:
        scores = _scores(call.spec, q, k)
        if masked:
            scores = jnp.where(_mask(call.spec, masks, heads), scores, MASKED)
        before = peak[...]
        after = jnp.maximum(before, jnp.max(scores, axis=0, keepdims=True))
        exp, old = jnp.exp(scores - after), jnp.exp(before - after)
        peak[...] = after
        total[...] = total[...] * old + jnp.sum(exp, axis=0, keepdims=True)
        acc[...] = acc[...] * old + _dot(v[...], exp.astype(v.dtype), 1, 0)

    _if_seen(visit, masks, accumulate)

    @pl.when(is_last(visit))
    def _() -> None:
        _store_heads(out, acc[...] / total[...])
        _store_heads(lse, peak[...] + jnp.log(total[...]))


def _gradients_kernel(
    call: Call, of_keys: bool, visits: Any, refs: Any, sinks: Any, results: Any, scratch: Any
) -> None:
    del sinks
    q, k, _, grad, *_ = refs
    visit = visits[pl.program_id(2)]

    @pl.when(is_first(visit))
    def _() -> None:
        for total in scratch:
            total[...] = jnp.zeros_like(total)

    def accumulate(masked: bool) -> None:
        probs, grad_scores = _score_gradients(call.spec, refs, masked)
        if not of_keys:
            scratch[0][...] += _dot(k[...], grad_scores.astype(k.dtype), 1, 0)
            return
        grad_k, grad_v = scratch
        grad_v[...] += _dot(_heads(grad), probs.astype(grad.dtype), 1, 1)
        grad_k[...] += _dot(_heads(q), grad_scores.astype(q.dtype), 1, 1)

    _if_seen(visit, refs[6:], accumulate)

    @pl.when(is_last(visit))
    def _() -> None:
        first = scratch[0][...] * call.spec.scale
        if not of_keys:
            _store_heads(results[0], first)
            return
        results[0][...] = first.astype(results[0].dtype)
        results[1][...] = scratch[1][...].astype(results[1].dtype)


def _if_seen(visit: Any, masks: Any, accumulate: Any) -> None:
    """Calls `accumulate(masked)` if the visit is seen."""
    if len(masks) > 2:  # Segments: any pair may be masked.
        pl.when(is_seen(visit))(functools.partial(accumulate, True))
        return
    pl.when(is_seen(visit) & is_whole(visit))(functools.partial(accumulate, False))
    pl.when(is_seen(visit) & ~is_whole(visit))(functools.partial(accumulate, True))


def _scores(spec: MaskSpec, q: Any, k: Any) -> Float32[Array, "k r"]:
    return capped(_dot(k[...], _heads(q), 0, 0) * spec.scale, spec)


def _score_gradients(spec: MaskSpec, refs: Any, masked: bool) -> tuple[Array, Array]:
    """Returns the probabilities, and the gradient of the scores without their scale, [k, r]."""
    q, k, v, grad, lse, delta, *masks = refs
    scores = _scores(spec, q, k)
    probs = jnp.exp(scores - _heads(lse))
    if masked:
        probs = jnp.where(_mask(spec, masks, q.shape[0]), probs, 0.0)
    grad_scores = probs * (_dot(v[...], _heads(grad), 0, 0) - _heads(delta))
    if spec.logit_cap is not None:
        grad_scores = grad_scores * (1 - jnp.square(scores / spec.logit_cap))
    return probs, grad_scores


def _mask(spec: MaskSpec, masks: Any, heads: int) -> Array:
    """Returns whether a query may attend to a key, [k, r]."""
    q_index, k_index, *segments = masks
    ahead = _side_by_side([q_index[...]] * heads) - _column(k_index[...])
    mask = ahead >= least_ahead(spec)
    if spec.window is not None:
        mask = mask & (ahead < spec.window)
    if segments:
        q_segments, k_segments = segments
        mask = mask & (_side_by_side([q_segments[...]] * heads) == _column(k_segments[...]))
    return mask


def _column(x: Int32[Array, "1 k"]) -> Int32[Array, "k 1"]:
    return jnp.broadcast_to(x, (128, x.shape[1])).T[:, :1]


def _heads(ref: Any) -> Array:
    """Returns the heads of a block side by side: [n, Dh, q] as [Dh, r], [n, q] as [1, r]."""
    if len(ref.shape) == 2:
        return _side_by_side([ref[i : i + 1, :] for i in range(ref.shape[0])])
    return _side_by_side([ref[i] for i in range(ref.shape[0])])


def _store_heads(ref: Any, x: Float32[Array, "x r"]) -> None:
    """Stores the columns of each head in a block; the reverse of `_heads`."""
    for i in range(ref.shape[0]):
        part = x[:, i * ref.shape[-1] : (i + 1) * ref.shape[-1]].astype(ref.dtype)
        if len(ref.shape) == 2:
            ref[i : i + 1, :] = part
        else:
            ref[i] = part


def _side_by_side(parts: list[Array]) -> Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def _dot(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
    dims = (((a_axis,), (b_axis,)), ((), ()))
    return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


class _Specs:
    """Blocks of arrays, by their width: `of_q` and `of_k` give the index of a visit's block."""

    def __init__(self, call: Call, q: Array, k: Array, of_q: Any, of_k: Any) -> None:
        _, chunks, heads, *_ = q.shape
        parts = chunks // k.shape[1]  # Chunks that share a group's keys.
        block_q, block_k = call.block_q, call.block_k
        self.q = lambda dim: pl.BlockSpec(
            (None, None, heads, dim, block_q), lambda b, c, i, at: (b, c, 0, 0, of_q(at[i]))
        )
        self.sums = pl.BlockSpec(
            (None, None, heads, block_q), lambda b, c, i, at: (b, c, 0, of_q(at[i]))
        )
        self.k = lambda dim: pl.BlockSpec(
            (None, None, dim, block_k), lambda b, c, i, at: (b, lax.div(c, parts), 0, of_k(at[i]))
        )
        self.k_sums = lambda dim: pl.BlockSpec(
            (None, None, dim, block_k), lambda b, c, i, at: (b, c, 0, of_k(at[i]))
        )
        self._of_masks = (
            pl.BlockSpec((1, block_q), lambda b, c, i, at: (0, of_q(at[i]))),
            pl.BlockSpec((1, block_k), lambda b, c, i, at: (0, of_k(at[i]))),
            pl.BlockSpec((None, 1, block_q), lambda b, c, i, at: (b, 0, of_q(at[i]))),
            pl.BlockSpec((None, 1, block_k), lambda b, c, i, at: (b, 0, of_k(at[i]))),
        )

    def of_masks(self, masks: Masks) -> list[tuple[Array, pl.BlockSpec]]:
        pairs = zip(masks, self._of_masks, strict=True)
        return [(array, spec) for array, spec in pairs if array is not None]


def _pallas_call(
    kernel: Any,
    call: Call,
    name: str,
    visits: Array,
    *,
    operands: Any,
    scalars: Array | None,
    results: Any,
    scratch: Any,
    inner_dims: int,
) -> Any:
    arrays, specs = [array for array, _ in operands], [spec for _, spec in operands]
    batch, chunks = arrays[0].shape[:2]
    if scalars is not None:
        arrays.append(scalars)
        specs.append(pl.BlockSpec(memory_space=pltpu.SMEM))

    def run(visits: Any, *refs: Any) -> None:
        ins, refs = refs[: len(arrays)], refs[len(arrays) :]
        ins, scalar = (ins, None) if scalars is None else (ins[:-1], ins[-1])
        kernel(visits, ins, scalar, refs[: len(results)], refs[len(results) :])

    return pl.pallas_call(
        run,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, chunks, visits.shape[0]),
            in_specs=specs,
            out_specs=[spec for *_, spec in results],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=[struct_like_varying(shape, dtype, arrays[0]) for shape, dtype, _ in results],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=_VMEM_LIMIT,
        ),
        cost_estimate=_cost(call, visits.shape[0], operands, results, inner_dims),
        interpret=call.interpret,
        name=name,
    )(visits, *arrays)


def _cost(
    call: Call, num_visits: int, operands: Any, results: Any, inner_dims: int
) -> pl.CostEstimate:
    """Returns the cost of the visits. Each loads its block of keys, or of queries, again.

    A matmul has the scores on two sides; `inner_dims` is the sum of the matmuls' third sizes.
    """
    batch, chunks, heads, *_ = operands[0][0].shape
    steps = batch * chunks * num_visits
    scores = steps * heads * call.block_q * call.block_k
    size = lambda shape, dtype: jnp.dtype(dtype).itemsize * math.prod(shape)
    once = sum(size(shape, dtype) for shape, dtype, _ in results)
    loaded = sum(
        size([x for x in spec.block_shape if x is not None], array.dtype)
        for array, spec in operands
    )
    return pl.CostEstimate(
        flops=2 * inner_dims * scores,
        transcendentals=scores * (1 if call.spec.logit_cap is None else 2),
        bytes_accessed=once + steps * loaded,
    )
