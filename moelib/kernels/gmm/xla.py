"""Grouped matmul as loops over blocks of rows, in plain XLA, on every platform.

Groups with rows are visited in order. The rows of a group are one edge block, part of which may be
masked, and then whole blocks, the largest first; nothing is padded or moved. One loop computes all
p products of a block and their activation, or the sum of p input gradients. A group's matrices are
read once, and their gradients are summed within the group and written once.

On CPUs it is the fastest form: `lax.ragged_dot` is dense outside TPUs, so that it takes 14 to 18
times as long for 16 groups.

Shapes: m rows, k in, n out, g groups, p matrices per group.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moelib.core.varying import zeros_like_varying
from moelib.kernels.backend import current_device
from moelib.kernels.gmm.groups import activated, row_ranges

# With 16 rows of 16 groups and two matrices of 2 MiB each, one loop takes 1.3 times as long as two.
_CACHE_BYTES = 2 << 20


def block_sizes(num_rows: int, num_groups: int) -> tuple[int, ...]:
    """Returns the numbers of rows in a block, largest first; the last is also the edge block's.

    An edge block wastes half of itself on average, so it is about half of an average group, and 64
    rows suffice to hide that each block packs the group's matrix again. Large groups are mostly
    computed in blocks of 256 rows; more or larger sizes gain nothing, and each takes time to
    compile. On CPUs, with one more size, masked rows cost most, so that edge blocks have 16 rows,
    and XLA gives matrices of 256 x 256 to several cores from 128 rows on. No block is larger than
    all rows together.
    """
    mean = num_rows / max(num_groups, 1)
    if mean >= 64 and current_device().platform == "cpu":
        return tuple(size for size in (256, 128, 64, 16) if size <= mean)
    edge = 8
    while edge < min(64, mean / 2):
        edge *= 2
    return (256, edge) if mean >= 256 else (min(edge, num_rows),)


def forward(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "g p k n"],
    group_sizes: Int[Array, "g"],
    bias: Float[Array, "g p n"] | None,
    *,
    activation: Callable[..., Array] | None,
    save: bool,
) -> tuple[Float[Array, "m n"], tuple[Float[Array, "m n"], ...]]:
    """Returns the activation of p products, which are rounded, and the products if `save`.

    The activation is computed by block, so that rows of no group stay zero. Matrices that a core's
    cache cannot hold together are multiplied in loops of their own.
    """
    p = rhs.shape[1]
    if activation is None or math.prod(rhs.shape[1:]) * rhs.dtype.itemsize <= _CACHE_BYTES:
        out, *products = _products(lhs, rhs, group_sizes, bias, range(p), activation, save=save)
        return out, tuple(products)
    parts = tuple(_products(lhs, rhs, group_sizes, bias, [i], None)[0] for i in range(p))
    return activated(parts, activation, group_sizes), parts if save else ()


def _products(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    bias: Array | None,
    indices: Sequence[int],
    activation: Callable[..., Array] | None,
    *,
    save: bool = False,
) -> list[Array]:
    """Returns the product with one matrix of each group, or the activation of several.

    If `save`, the products follow the activation.
    """

    def block(group: Array) -> Callable[[Array, int], list[Array]]:
        matrices = [_matrix(rhs, group, i) for i in indices]
        added = None if bias is None else lax.dynamic_index_in_dim(bias, group, keepdims=False)

        def products(row: Array, size: int) -> list[Array]:
            rows = lax.dynamic_slice_in_dim(lhs, row, size)
            parts = [_dot(rows, matrix, (1, 0)) for matrix in matrices]
            if added is not None:
                pairs = zip(indices, parts, strict=True)
                parts = [x + added[i : i + 1].astype(jnp.float32) for i, x in pairs]
            parts = [x.astype(lhs.dtype) for x in parts]
            if activation is None:
                return parts
            out = activation(*(x.astype(jnp.float32) for x in parts)).astype(lhs.dtype)
            return [out, *parts] if save else [out]

        return products

    shape = (lhs.shape[0], rhs.shape[3])
    count = 1 + len(indices) if save and activation is not None else 1
    outs = [_zeros(shape, lhs.dtype, lhs, i) for i in range(count)]
    return _write_rows(group_sizes, outs, block)


def input_gradient(
    grads: tuple[Float[Array, "m n"], ...],
    rhs: Float[Array, "g p k n"],
    group_sizes: Int[Array, "g"],
) -> Float[Array, "m k"]:
    """Returns the sum over p of `grads[p] @ rhs[:, p]^T`, by group."""

    def block(group: Array) -> Callable[[Array, int], list[Array]]:
        matrix = jnp.concatenate([_matrix(rhs, group, i) for i in range(len(grads))], axis=1)

        def product(row: Array, size: int) -> list[Array]:
            rows = [lax.dynamic_slice_in_dim(grad, row, size) for grad in grads]
            return [_dot(jnp.concatenate(rows, axis=1), matrix, (1, 1)).astype(rhs.dtype)]

        return product

    out = _zeros((grads[0].shape[0], rhs.shape[2]), rhs.dtype, grads[0])
    return _write_rows(group_sizes, [out], block)[0]


def weight_gradient(
    lhs: Float[Array, "m k"],
    grads: tuple[Float[Array, "m n"], ...],
    group_sizes: Int[Array, "g"],
    *,
    with_sums: bool,
) -> tuple[Float[Array, "g p k n"], Float[Array, "g p n"] | None]:
    """Returns the gradients of the p matrices of each group, and of their biases if wanted."""
    (m, k), n, p, g = lhs.shape, grads[0].shape[1], len(grads), len(group_sizes)
    outs = [_zeros((g, p, k, n), lhs.dtype, grads[0])]
    if with_sums:
        outs.append(_zeros((g, p, n), lhs.dtype, grads[0]))
    blocks = block_sizes(m, g)

    def product(row: Array, size: int, mine: Array | None = None) -> list[list[Array]]:
        rows, *others = [lax.dynamic_slice_in_dim(x, row, size) for x in (lhs, *grads)]
        if mine is not None:  # Both, for a NaN in another group's row times zero is NaN.
            rows, *others = [jnp.where(mine, x, 0) for x in (rows, *others)]
        result = [_transposed_dots(rows, others)]
        if with_sums:
            result.append([x.astype(jnp.float32).sum(axis=0) for x in others])
        return result

    def add(totals: list[list[Array]], row: Array, size: int) -> list[list[Array]]:
        return jax.tree.map(jnp.add, totals, product(row, size))

    def visit(group: Array, start: Array, end: Array, outs: list[Array]) -> list[Array]:
        row, stop, mine = _edge(start, end, blocks[-1], m)
        totals = _whole_blocks(stop, end, blocks, add, product(row, blocks[-1], mine))
        for index, parts in enumerate(totals):
            for i, part in enumerate(parts):
                at = (group, i, *(0 for _ in part.shape))
                part = part.astype(lhs.dtype)[None, None]
                outs[index] = lax.dynamic_update_slice(outs[index], part, at)
        return outs

    outs = _visit_groups(group_sizes, m, visit, outs)
    return outs[0], outs[1] if with_sums else None


def _zeros(shape: Sequence[int], dtype: DTypeLike, array: Array, index: int = 0) -> Array:
    """Returns zeros that no other array or index shares, to be written to in a loop.

    On CPUs XLA would make zeros once for all layers, at the start, and copy them for each loop.
    There they depend on `array`, as no number is NaN and equal to `index`.
    """
    if array.size == 0 or current_device().platform != "cpu":
        return zeros_like_varying(shape, dtype, array)
    first = array[(0,) * array.ndim]
    return jnp.broadcast_to((jnp.isnan(first) & (first == index)).astype(dtype), shape)


def _matrix(rhs: Array, group: Array, part: int) -> Array:
    """Returns `rhs[group, part]`; `rhs[:, part]` would copy matrices of groups without rows too."""
    return lax.dynamic_slice(rhs, (group, part, 0, 0), (1, 1, *rhs.shape[2:]))[0, 0]


def _dot(x: Array, y: Array, contracted: tuple[int, int]) -> Array:
    """Returns the product of two matrices in float32, summed over one dimension of each."""
    dims = (((contracted[0],), (contracted[1],)), ((), ()))
    return lax.dot_general(x, y, dims, preferred_element_type=jnp.float32)


def _transposed_dots(rows: Array, others: Sequence[Array]) -> list[Array]:
    """Returns the products of the transpose with several matrices.

    CPUs transpose in memory first: products of 64 to 256 rows are then 1.3 to 1.5 times as fast.
    One product of all matrices is large enough for several cores.
    """
    if current_device().platform != "cpu":
        return [_dot(rows, x, (0, 0)) for x in others]
    columns = lax.optimization_barrier(rows.T)
    return jnp.split(_dot(columns, jnp.concatenate(others, axis=1), (1, 0)), len(others), axis=1)


def _write_rows(
    group_sizes: Int[Array, "g"],
    outs: list[Array],
    block: Callable[[Array], Callable[[Array, int], list[Array]]],
) -> list[Array]:
    """Writes to the rows of each group the results `block(group)(first row, number of rows)`."""
    m = outs[0].shape[0]
    blocks = block_sizes(m, len(group_sizes))

    def write(outs: list[Array], row: Array, values: list[Array]) -> list[Array]:
        pairs = zip(outs, values, strict=True)
        return [lax.dynamic_update_slice_in_dim(out, x, row, axis=0) for out, x in pairs]

    def visit(group: Array, start: Array, end: Array, outs: list[Array]) -> list[Array]:
        compute = block(group)
        row, stop, mine = _edge(start, end, blocks[-1], m)
        old = [lax.dynamic_slice_in_dim(out, row, blocks[-1]) for out in outs]
        pairs = zip(compute(row, blocks[-1]), old, strict=True)
        outs = write(outs, row, [jnp.where(mine, new, x) for new, x in pairs])
        step = lambda outs, row, size: write(outs, row, compute(row, size))
        return _whole_blocks(stop, end, blocks, step, outs)

    return _visit_groups(group_sizes, m, visit, outs)


def _visit_groups(
    group_sizes: Int[Array, "g"],
    num_rows: int,
    visit: Callable[[Array, Array, Array, Any], Any],
    carry: Any,
) -> Any:
    """Folds `visit(group, start row, end row, carry)` over the groups that have rows, in order."""
    starts, ends = row_ranges(group_sizes, num_rows)
    num_full = jnp.cumsum(ends > starts, dtype=jnp.int32)  # Up to and with each group.
    order = lax.iota(jnp.int32, len(starts))
    # The i-th group that has rows, for each i; computed once, because small operations in a loop
    # take as long as a block of a few rows.
    groups = jnp.sum(num_full[None] <= order[:, None], axis=1, dtype=jnp.int32)
    ranges = jnp.stack([order, starts, ends], axis=1)[jnp.minimum(groups, len(starts) - 1)]

    def body(i: Array, carry: Any) -> Any:
        group, start, end = ranges[i]
        return visit(group, start, end, carry)

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
