"""The Hopper GPU's kernels of attention: outputs, and gradients of queries, keys and values.

Scores never leave the registers. Both kernels of gradients recompute them, so that each sums its
own result in registers, and none in the GPU's memory.

Shapes: sums over the visits of a tile of rows; Dv entries of a value, P parts of the heads.

Source: Dao et al., arXiv:2205.14135; Dao, arXiv:2307.08691; Shah et al., arXiv:2407.08608.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from moelib.kernels.flash_attention.gpu_block import (
    LOG2E,
    Block,
    before_cap,
    full,
    launch,
    over,
    products,
    scores,
)
from moelib.kernels.flash_attention.gpu_tiles import Call, Visited
from moelib.kernels.flash_attention.reference import MASKED
from moelib.kernels.hopper import SIDE

_BY_ROW = plgpu.Layout.WGMMA.reduce(1)  # Of a number per row of a block of scores.
_BY_COLUMN = plgpu.Layout.WGMMA.reduce(0)


def outputs(
    call: Call,
    visited: Visited,
    q: Float[Array, "B Q H Dh"],
    k: Float[Array, "B K G Dh"],
    v: Float[Array, "B K G Dv"],
    sinks: Float32[Array, "H"],
    *,
    dtype: DTypeLike,
) -> tuple[Float[Array, "B Q H Dv"], Float32[Array, "B H Q2"]]:
    """Returns attention, and the logsumexp of each query, padded to whole tiles.

    Sinks are the logsumexps to begin with: `EMPTY` for none.
    """
    (batch, length, heads, dim), (*_, groups, v_dim) = q.shape, v.shape

    def load(block: Block, q: Any, k: Any, v: Any, *_: Any) -> None:
        block.load_rows(block.head, q)
        block.load_columns(lambda _: lax.div(block.head, heads // groups), k, v)

    def multiply(block: Block, half: Array, *refs: Any) -> None:
        *_, v, sinks, out, lse = refs
        first = block.row + half * SIDE
        (rows,), (keys, values), (k_ring, v_ring) = block.rows, block.columns, block.rings
        plgpu.barrier_wait(block.loaded)

        def step(i: Array, carry: Any) -> Any:
            acc, peak, total = carry
            start, whole = block.visit(i)
            (made,) = products((rows.at[half], keys.at[k_ring.wait(i)]))
            k_ring.release(i)
            made = block.masked(scores(call.spec, made), MASKED, first, start, whole)
            after = jnp.maximum(peak, jnp.max(made, axis=1))
            exp, old = jnp.exp2(made - over(after, made, 0)), jnp.exp2(peak - after)
            total = total * old + jnp.sum(exp, axis=1)
            block_v = values.at[v_ring.wait(i)]
            (acc,) = block.add_product(acc * over(old, acc, 0), exp.astype(v.dtype), block_v)
            v_ring.release(i)
            return acc, after, total

        peak = full((SIDE,), sinks[block.head] * LOG2E, _BY_ROW)
        total = full((SIDE,), 1.0, _BY_ROW)  # The sink's own share; that of EMPTY vanishes.
        carry = full((SIDE, v_dim)), peak, total
        acc, peak, total = lax.fori_loop(0, block.count, step, carry)
        numbers = block.numbers.at[half]
        numbers[...] = (peak + jnp.log2(total)) * (1 / LOG2E)
        plgpu.commit_smem()
        at = block.batch, block.head, pl.ds(first, SIDE)
        plgpu.copy_smem_to_gmem(numbers, lse.at[at])
        block.store(acc / over(total, acc, 0), out, first)

    padded = batch, heads, visited.counts.shape[1] * call.tiles.rows
    return launch(
        "attention",
        load,
        multiply,
        call,
        visited,
        *(q, k, v, sinks),
        rows=(q,),
        columns=(k, v),
        numbers=(2, SIDE),
        results=[
            jax.ShapeDtypeStruct((batch, length, heads, v_dim), dtype),
            jax.ShapeDtypeStruct(padded, jnp.float32),
        ],
        flops=2 * (dim + v_dim) * heads,
    )


def query_gradient(
    call: Call,
    visited: Visited,
    q: Float[Array, "B Q H Dh"],
    k: Float[Array, "B K G Dh"],
    v: Float[Array, "B K G Dv"],
    grad: Float[Array, "B Q H Dv"],
    sums: Float32[Array, "B H 2 Q2"],
    *,
    dtype: DTypeLike,
) -> Float[Array, "B Q H Dh"]:
    """Returns the gradient in the queries; sums are the logsumexp and delta of each query."""
    (heads, dim), (groups, v_dim) = q.shape[2:], v.shape[2:]
    at_once = 1 if dim > 192 else 2  # Products; registers hold no second one for a wider result.

    def load(block: Block, *refs: Any) -> None:
        q, k, v, grad, *_ = refs
        block.load_rows(block.head, q, grad)
        block.load_columns(lambda _: lax.div(block.head, heads // groups), k, v)

    def multiply(block: Block, half: Array, *refs: Any) -> None:
        *_, sums, out = refs
        first = block.row + half * SIDE
        (keys, values), (k_ring, v_ring) = block.columns, block.rings
        at = pl.ds(first, SIDE)
        lse, delta = (
            plgpu.load(sums.at[block.batch, block.head, i, at], layout=_BY_ROW, optimized=False)
            for i in range(2)
        )
        plgpu.barrier_wait(block.loaded)

        def step(i: Array, acc: Array) -> Array:
            start, whole = block.visit(i)
            block_k, block_v = keys.at[k_ring.wait(i)], values.at[v_ring.wait(i)]
            pairs = list(zip((x.at[half] for x in block.rows), (block_k, block_v), strict=True))
            made, *others = products(*pairs[:at_once])
            made = scores(call.spec, made)
            probs = jnp.exp2(made - over(lse * LOG2E, made, 0))
            probs = block.masked(probs, 0.0, first, start, whole)
            weights = before_cap(call.spec, made, probs)
            (grad_probs,) = others or products(pairs[1])
            v_ring.release(i)
            grads = weights * (grad_probs - over(delta, made, 0))
            (acc,) = block.add_product(acc, grads.astype(q.dtype), block_k)
            k_ring.release(i)
            return acc

        acc = lax.fori_loop(0, block.count, step, full((SIDE, dim)))
        block.store(acc * call.spec.scale, out, first)

    (result,) = launch(
        "attention_query_gradient",
        load,
        multiply,
        call,
        visited,
        *(q, k, v, grad, sums),
        rows=(q, grad),
        columns=(k, v),
        results=[jax.ShapeDtypeStruct(q.shape, dtype)],
        flops=2 * (2 * dim + v_dim) * heads,
    )
    return result


def key_gradients(
    call: Call,
    visited: Visited,
    q: Float[Array, "B Q H Dh"],
    k: Float[Array, "B K G Dh"],
    v: Float[Array, "B K G Dv"],
    grad: Float[Array, "B Q H Dv"],
    sums: Float32[Array, "B H 2 Q2"],
    *,
    parts: int,
    dtype: DTypeLike,
) -> tuple[Float[Array, "B K P Dh"], Float[Array, "B K P Dv"]]:
    """Returns the gradients in keys and values, each the sum over a part of a group's heads.

    There are `parts` of them per group. With tiles of 128 keys, a warpgroup computes both gradients
    of 64 of them; with tiles of 64, one computes the gradient of the keys and the other one that of
    the values, because the registers of one hold no more.
    """
    dims = q.shape[3], v.shape[3]
    num_parts = k.shape[2] * parts
    own = q.shape[2] // num_parts  # Heads of a part.
    both = call.tiles.rows > SIDE

    def load(block: Block, *refs: Any) -> None:
        q, k, v, grad, sums, *_ = refs
        block.load_rows(lax.div(block.head, parts), k, v)
        head = lambda i: block.head * own + lax.rem(i, own)
        block.load_columns(head, q, grad, numbers=sums)

    def multiply(block: Block, warpgroup: Array, *refs: Any) -> None:
        alone = lambda *of: lambda: _key_gradients(block, 0, of, refs[-2:])
        if both:
            _key_gradients(block, warpgroup, (True, True), refs[-2:])
        else:
            lax.cond(warpgroup == 0, alone(True, False), alone(False, True))

    shapes = ((*k.shape[:2], num_parts, size) for size in dims)
    return launch(
        "attention_key_gradient",
        load,
        multiply,
        call,
        visited,
        *(q, k, v, grad, sums),
        rows=(k, v),
        columns=(q, grad),
        numbers=(call.tiles.stages, 2, call.tiles.columns),
        results=[jax.ShapeDtypeStruct(shape, dtype) for shape in shapes],
        flops=2 * (2 * sum(dims) + (0 if both else dims[0])) * q.shape[2],
        heads=own,
    )


def _key_gradients(block: Block, half: Any, of: tuple[bool, ...], results: Any) -> None:
    """Stores the gradients of a warpgroup's keys and values, each if its flag in `of` is set."""
    spec, (of_keys, of_values) = block.call.spec, of
    first = block.row + half * SIDE
    (keys, values), (queries, grads) = block.rows, block.columns
    q_ring, grad_ring = block.rings
    plgpu.barrier_wait(block.loaded)

    def step(i: Array, carry: Any) -> Any:
        grad_k, grad_v = carry
        start, whole = block.visit(i)
        slot = q_ring.wait(i)
        grad_ring.wait(i)
        (made,) = products((keys.at[half], queries.at[slot]))
        made = scores(spec, made)
        number = lambda i: plgpu.load(block.numbers.at[slot, i], layout=_BY_COLUMN)
        probs = jnp.exp2(made - over(number(0) * LOG2E, made, 1))
        probs = block.masked(probs, 0.0, first, start, whole)
        weights = before_cap(spec, made, probs)
        # Only now, because registers do not hold a second block of scores while masking.
        pairs = [(values.at[half], grads.at[slot])] * of_keys
        if of_values:
            probs = probs.astype(grads.dtype)
            grad_v, *others = block.add_product(grad_v, probs, grads.at[slot], *pairs)
        else:
            others = products(*pairs)
        delta = number(1)
        plgpu.commit_smem()  # The copy engine writes the next numbers after these are read.
        grad_ring.release(i)
        if of_keys:
            made = weights * (others[0] - over(delta, made, 1))
            (grad_k,) = block.add_product(grad_k, made.astype(queries.dtype), queries.at[slot])
        q_ring.release(i)
        return grad_k, grad_v

    dims = (x.shape[-1] if use else SIDE for x, use in zip((keys, values), of, strict=True))
    carry = tuple(full((SIDE, size)) for size in dims)
    grad_k, grad_v = lax.fori_loop(0, block.count, step, carry)
    if of_keys:
        block.store(grad_k * spec.scale, results[0], first)
    if of_values:
        block.store(grad_v, results[1], first)
