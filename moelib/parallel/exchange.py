"""Ragged all-to-all: devices of a group exchange different numbers of rows.

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
    """Returns the number of devices along the mesh axes, inside a shard_map; 1 without axes."""
    return lax.axis_size(tuple(axes)) if axes else 1


def gather_sizes(sizes: Int[Array, "n"], axes: Axes) -> Int[Array, "n n"]:
    """Returns the numbers of rows [sender, receiver] of a group from those each device sends."""
    return lax.all_gather(sizes, axes, axis=0, tiled=False)


def exchange(
    rows: Float[Array, "s D"],
    sizes: Int[Array, "n n"],
    *,
    axes: Axes,
    num_received: int,
    max_pair: int,
) -> Float[Array, "r D"]:
    """Returns the rows that this device receives, sorted by sender.

    The transposed sizes send rows back: `exchange(exchange(x, sizes), sizes.T)` equals x in the
    rows sent. This is also the derivative, so that the backward pass sends rows only.

    On CPUs, where XLA has no ragged all-to-all, blocks of `max_pair` rows are exchanged instead.

    Args:
        rows: Rows to send, sorted by receiver. Rows past the number sent are ignored.
        sizes: Numbers of rows [sender, receiver], the same on all devices of the group; no column
            may sum to more than `num_received`.
        axes: Mesh axes of the group.
        num_received: Number of rows of the result. Rows past the number received are undefined.
        max_pair: Maximum number of rows that one device sends to another.
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
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        return lax.platform_dependent(rows, sizes, cpu=emulated, default=native)
    # Without a conditional: saved for a backward pass, its index is no constant of the program.
    return (emulated if device.platform == "cpu" else native)(rows, sizes)


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
    # Else XLA makes the buffer once, before a loop, and copies it in each turn.
    empty, sizes = lax.optimization_barrier((empty, sizes))
    return lax.ragged_all_to_all(
        rows,
        vary(empty, sorted(varying_axes(rows))),
        _starts(sent),
        sent,
        _starts(sizes, axis=0)[me],  # Offsets of this device's rows on each receiver.
        received,
        axis_name=axes,
    )


def _emulated(axes: Axes, num_received: int, max_pair: int, rows: Array, sizes: Array) -> Array:
    n = sizes.shape[0]
    me = lax.axis_index(axes)
    sent, received = sizes[me], sizes[:, me]
    index = _starts(sent)[:, None] + jnp.arange(max_pair, dtype=jnp.int32)[None]  # [n, max_pair]
    blocks = rows.at[index].get(mode="clip")  # [n, max_pair, D]
    blocks = lax.all_to_all(blocks, axes, 0, 0, tiled=True)
    row = jnp.arange(num_received, dtype=jnp.int32)
    sender = jnp.minimum(jnp.searchsorted(jnp.cumsum(received), row, side="right"), n - 1)
    offset = row - _starts(received)[sender]
    flat = blocks.reshape(n * max_pair, *rows.shape[1:])
    return flat.at[sender * max_pair + offset].get(mode="clip")


def _starts(sizes: Array, axis: int = 0) -> Array:
    return (jnp.cumsum(sizes, axis=axis) - sizes).astype(jnp.int32)
