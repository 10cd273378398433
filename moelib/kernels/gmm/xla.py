"""Grouped matmul as loops over blocks of rows, in plain XLA, on every platform.

Groups with rows are visited in order. The rows of a group are one edge block, part of which may be
masked, and then whole blocks, the largest first; nothing is padded or moved. A group's matrix is
read once, and its gradient is summed within the group and written once.

On CPUs it is the fastest form: `lax.ragged_dot` is dense outside TPUs, so that it takes 14 to 18
times as long for 16 groups.

Shapes: m rows, k in, n out, g groups, p matrices per group.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moelib.core.varying import zeros_like_varying
from moelib.kernels.gmm.groups import row_ranges


def block_sizes(num_rows: int, num_groups: int) -> tuple[int, ...]:
    """Returns the numbers of rows in a block, largest first; the last is also the edge block's.

    An edge block wastes half of itself on average, so it is no larger than an average group, and 64
    rows suffice to hide that each block packs the group's matrix again. Large groups are mostly
    computed in blocks of 256 rows; more or larger sizes gain nothing, and each takes time to
    compile. No block is larger than all rows together.
    """
    mean = num_rows / max(num_groups, 1)
    edge = 8
    while edge < min(64, mean):
        edge *= 2
    return (256, edge) if mean >= 256 else (min(edge, num_rows),)


def gmm(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "g p ..."],
    part: int,
    group_sizes: Int[Array, "g"],
    bias: Float[Array, "g n"] | None,
    *,
    transpose_rhs: bool,
    out_dtype: DTypeLike,
) -> Float[Array, "m n"]:
    """Returns `lhs[i] @ rhs[group of row i, part]` plus its bias, zeros for rows of no group.

    The part is an index because a slice of rhs would copy the matrices of groups without rows too.
    """
    m, n = lhs.shape[0], rhs.shape[-2 if transpose_rhs else -1]
    out = zeros_like_varying((m, n), out_dtype, lhs)
    blocks = block_sizes(m, len(group_sizes))
    ranges = row_ranges(group_sizes, m)
    dims = (((1,), (1 if transpose_rhs else 0,)), ((), ()))

    def visit(group: Array, start: Array, end: Array, out: Array) -> Array:
        matrix = lax.dynamic_slice(rhs, (group, part, 0, 0), (1, 1, *rhs.shape[2:]))[0, 0]
        added = None if bias is None else lax.dynamic_index_in_dim(bias, group)  # [1, n]

        def product(row: Array, size: int) -> Array:
            rows = lax.dynamic_slice_in_dim(lhs, row, size)
            result = lax.dot_general(rows, matrix, dims, preferred_element_type=jnp.float32)
            if added is not None:
                result += added.astype(jnp.float32)
            return result.astype(out_dtype)

        row, stop, mine = _edge(start, end, blocks[-1], m)
        old = lax.dynamic_slice_in_dim(out, row, blocks[-1])
        edge = jnp.where(mine, product(row, blocks[-1]), old)
        out = lax.dynamic_update_slice_in_dim(out, edge, row, axis=0)

        def write(out: Array, row: Array, size: int) -> Array:
            return lax.dynamic_update_slice_in_dim(out, product(row, size), row, axis=0)

        return _whole_blocks(stop, end, blocks, write, out)

    return _visit_groups(*ranges, visit, out)


def gmm_weight_gradient(
    lhs: Float[Array, "m k"],
    grad: Float[Array, "m n"],
    group_sizes: Int[Array, "g"],
    *,
    with_sums: bool,
) -> tuple[Float[Array, "g k n"], Float[Array, "g n"] | None]:
    """Returns the sums over each group's rows i of `lhs[i]^T grad[i]`, and of grad if wanted."""
    (m, k), n, g = lhs.shape, grad.shape[1], len(group_sizes)
    outs = [zeros_like_varying((g, k, n), lhs.dtype, lhs)]
    if with_sums:
        outs.append(zeros_like_varying((g, n), lhs.dtype, lhs))
    blocks = block_sizes(m, g)
    ranges = row_ranges(group_sizes, m)

    def product(row: Array, size: int, mine: Array | None = None) -> list[Array]:
        pair = [lax.dynamic_slice_in_dim(x, row, size) for x in (lhs, grad)]
        if mine is not None:  # Both, for a NaN in another group's row times zero is NaN.
            pair = [jnp.where(mine, x, 0) for x in pair]
        dims = (((0,), (0,)), ((), ()))
        result = [lax.dot_general(pair[0], pair[1], dims, preferred_element_type=jnp.float32)]
        return result if not with_sums else [*result, pair[1].astype(jnp.float32).sum(axis=0)]

    def add(totals: list[Array], row: Array, size: int) -> list[Array]:
        return jax.tree.map(jnp.add, totals, product(row, size))

    def visit(group: Array, start: Array, end: Array, outs: list[Array]) -> list[Array]:
        row, stop, mine = _edge(start, end, blocks[-1], m)
        totals = _whole_blocks(stop, end, blocks, add, product(row, blocks[-1], mine))
        return [
            lax.dynamic_update_index_in_dim(out, total.astype(out.dtype), group, axis=0)
            for out, total in zip(outs, totals, strict=True)
        ]

    outs = _visit_groups(*ranges, visit, outs)
    return outs[0], outs[1] if with_sums else None


def _visit_groups(
    starts: Int[Array, "g"],
    ends: Int[Array, "g"],
    visit: Callable[[Array, Array, Array, Any], Any],
    carry: Any,
) -> Any:
    """Folds `visit(group, start row, end row, carry)` over the groups that have rows, in order."""
    num_full = jnp.cumsum(ends > starts, dtype=jnp.int32)  # Up to and with each group.

    def body(i: Array, carry: Any) -> Any:
        group = jnp.sum(num_full <= i, dtype=jnp.int32)  # The i-th, from 0, that has rows.
        return visit(group, starts[group], ends[group], carry)

    return lax.fori_loop(0, num_full[-1], body, carry)


def _edge(start: Array, end: Array, size: int, num_rows: int) -> tuple[Array, Array, Array]:
    """Returns an edge block's (first row, end of its own rows, mask of its own rows [size, 1]).

    Its own rows are the group's first ones, 1 at least, so that a multiple of the size remains.
    Near the end of all rows the block begins before its own rows.
    """
    stop = start + (end - start - 1) % size + 1
    row = jnp.minimum(start, num_rows - size)
    rows = row + lax.iota(jnp.int32, size)
    return row, stop, ((rows >= start) & (rows < stop))[:, None]


def _whole_blocks(
    start: Array,
    end: Array,
    sizes: tuple[int, ...],
    step: Callable[[Any, Array, int], Any],
    carry: Any,
) -> Any:
    """Folds `step(carry, first row, size)` over the blocks of the rows from start to end."""
    row = start
    for size in sizes:
        state = (row, carry)
        row, carry = lax.while_loop(
            lambda state, size=size: state[0] + size <= end,
            lambda state, size=size: (state[0] + size, step(state[1], state[0], size)),
            state,
        )
    return carry
