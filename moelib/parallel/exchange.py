"""The ragged all-to-all: each device sends another number of rows to each device of a group.

Shapes: n devices of the group, s rows sent at most, r rows received at most, D width.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moelib.core.varying import vary, varying_axes

Axes = tuple[str, ...]


def group_size(axes: Sequence[str]) -> int:
    """Returns how many devices the mesh axes have together, inside of a shard_map; 1 for none."""
    return lax.axis_size(tuple(axes)) if axes else 1


def gather_sizes(sizes: Int[Array, "n"], axes: Axes) -> Int[Array, "n n"]:
    """Returns the numbers of rows [sender, receiver] of a group, from each device's own."""
    return lax.all_gather(sizes, axes, axis=0, tiled=False)


def exchange(
    rows: Float[Array, "s D"],
    sizes: Int[Array, "n n"],
    *,
    axes: Axes,
    num_received: int,
    max_pair: int,
) -> Float[Array, "r D"]:
    """Returns the rows that the devices of the group sent here, sorted by sender.

    The transposed sizes send rows back: `exchange(exchange(x, sizes), sizes.T)` is x where rows
    were sent. That is its derivative too, so that nothing but rows travels in the backward pass.

    Where XLA has no ragged all-to-all (CPU), blocks of `max_pair` rows are exchanged instead.

    Args:
        rows: Sorted by receiver. Rows past the number sent may hold anything.
        sizes: How many rows each device [first dimension] sends to each, equal on all devices of
            the group; no column may sum to more than `num_received`.
        axes: The mesh axes of the group.
        num_received: Rows of the result; those past the number received may hold anything.
        max_pair: The most rows that one device sends to one other.
    """
    sizes = vary(sizes, sorted(varying_axes(rows)))
    return _exchange(axes, rows.shape[0], num_received, max_pair, rows, sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _exchange(
    axes: Axes, num_sent: int, num_received: int, max_pair: int, rows: Array, sizes: Array
) -> Array:
    del num_sent
    native = functools.partial(_native, axes, num_received)
    emulated = functools.partial(_emulated, axes, num_received, max_pair)
    return lax.platform_dependent(rows, sizes, cpu=emulated, default=native)


def _forward(
    axes: Axes, num_sent: int, num_received: int, max_pair: int, rows: Array, sizes: Array
) -> tuple[Array, Array]:
    return _exchange(axes, num_sent, num_received, max_pair, rows, sizes), sizes


def _backward(
    axes: Axes, num_sent: int, num_received: int, max_pair: int, sizes: Array, grad: Array
) -> tuple[Array, None]:
    return _exchange(axes, num_received, num_sent, max_pair, grad, sizes.T), None


_exchange.defvjp(_forward, _backward)


def _native(axes: Axes, num_received: int, rows: Array, sizes: Array) -> Array:
    me = lax.axis_index(axes)
    sent, received = sizes[me], sizes[:, me]
    empty = lax.empty((num_received, *rows.shape[1:]), rows.dtype)
    return lax.ragged_all_to_all(
        rows,
        vary(empty, sorted(varying_axes(rows))),
        _starts(sent),
        sent,
        _starts(sizes, axis=0)[me],  # Where my rows begin on each receiver.
        received,
        axis_name=axes,
    )


def _emulated(axes: Axes, num_received: int, max_pair: int, rows: Array, sizes: Array) -> Array:
    n = sizes.shape[0]
    me = lax.axis_index(axes)
    sent, received = sizes[me], sizes[:, me]
    places = _starts(sent)[:, None] + jnp.arange(max_pair, dtype=jnp.int32)[None]  # [n, max_pair]
    blocks = rows.at[places].get(mode="clip")  # [n, max_pair, D]
    blocks = lax.all_to_all(blocks, axes, 0, 0, tiled=True)
    row = jnp.arange(num_received, dtype=jnp.int32)
    sender = jnp.minimum(jnp.searchsorted(jnp.cumsum(received), row, side="right"), n - 1)
    place = row - _starts(received)[sender]
    flat = blocks.reshape(n * max_pair, *rows.shape[1:])
    return flat.at[sender * max_pair + place].get(mode="clip")


def _starts(sizes: Array, axis: int = 0) -> Array:
    return (jnp.cumsum(sizes, axis=axis) - sizes).astype(jnp.int32)
