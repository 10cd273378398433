"""Groups of rows: where each begins and ends, and which tiles of rows a TPU kernel visits for it.

Everything here is a sum over comparisons of [v, g], which XLA fuses; nothing is gathered, sorted or
scattered. Calls with the same tile of rows share the result, because XLA computes equal expressions
once.

Shapes: m rows, n columns, g groups, v visits.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int32

from moelib.kernels.operands import keep_where


class Visits(NamedTuple):
    """The work of each visit of a kernel to a tile of rows; undefined past the number of visits.

    Tiles in which no group has rows are visited last, to be filled with zeros: such a visit has no
    rows, and repeats the group and the tile to read of the visit before, so that it reads nothing.
    """

    group: Int32[Array, "v"]
    tile: Int32[Array, "v"]  # To read.
    out_tile: Int32[Array, "v"]  # To write; `tile` in a visit that has rows.
    start: Int32[Array, "v"]  # First row of the group within the tile.
    end: Int32[Array, "v"]  # Row after its last within the tile.
    first: Int32[Array, "v"]  # 1 where a new output begins, else 0.
    last: Int32[Array, "v"]  # 1 where it ends.


def row_ranges(
    group_sizes: Int[Array, "g"], num_rows: int
) -> tuple[Int32[Array, "g"], Int32[Array, "g"]]:
    """Returns each group's first row and the row after its last, none past the last of all rows."""
    sums = jnp.cumsum(group_sizes, dtype=jnp.int32)
    starts = sums - group_sizes.astype(jnp.int32)
    return jnp.minimum(starts, num_rows), jnp.minimum(sums, num_rows)


def activated(
    parts: Sequence[Float[Array, "m n"]],
    activation: Callable[..., Array],
    group_sizes: Int[Array, "g"],
) -> Float[Array, "m n"]:
    """Returns the activation of products, computed in float32; 0 in rows of no group."""
    out = activation(*(part.astype(jnp.float32) for part in parts)).astype(parts[0].dtype)
    num_rows = jnp.sum(group_sizes, dtype=jnp.int32)
    return keep_where(lax.iota(jnp.int32, out.shape[0])[:, None] < num_rows, out)


def output_visits(
    starts: Int32[Array, "g"], ends: Int32[Array, "g"], num_rows: int, tile: int
) -> tuple[Visits, Int32[Array, ""]]:
    """Returns the visits that write every tile of rows, and their number.

    A group visits each tile in which it has rows; an empty group, none. Then come the tiles in
    which no group has rows. `starts` and `ends` are those of `row_ranges`.
    """
    num_tiles, num_groups = -(-num_rows // tile), len(starts)
    counts = jnp.where(ends > starts, _tile(ends - 1, tile) - _tile(starts, tile) + 1, 0)
    visits, total = _visits(starts, ends, counts, tile, num_tiles + num_groups - 1)
    used = _tile(ends[-1] + tile - 1, tile)  # Tiles with rows of groups: the first ones.
    rest = lax.iota(jnp.int32, len(visits.group)) - total
    visits = visits._replace(
        out_tile=jnp.where(rest < 0, visits.tile, rest + used),
        start=jnp.where(rest < 0, visits.start, 0),
        end=jnp.where(rest < 0, visits.end, 0),
    )
    count = total + num_tiles - used
    first, last = _changes(visits.out_tile, count)
    return visits._replace(first=first, last=last), count


def weight_visits(
    starts: Int32[Array, "g"], ends: Int32[Array, "g"], num_rows: int, tile: int
) -> tuple[Visits, Int32[Array, ""]]:
    """Returns the visits that write the sums of every group, and their number.

    A group visits each tile in which it has rows; an empty group visits one, without rows in it.
    """
    num_tiles, num_groups = -(-num_rows // tile), len(starts)
    counts = jnp.where(ends > starts, _tile(ends - 1, tile) - _tile(starts, tile) + 1, 1)
    visits, total = _visits(starts, ends, counts, tile, num_tiles + num_groups)
    visits = visits._replace(tile=jnp.minimum(visits.tile, num_tiles - 1))
    first, last = _changes(visits.group, total)
    return visits._replace(out_tile=visits.tile, first=first, last=last), total


def _visits(
    starts: Array, ends: Array, counts: Array, tile: int, length: int
) -> tuple[Visits, Array]:
    """Returns `counts` visits of consecutive tiles per group, then copies of the last visit.

    Also returns the number of visits that are no copies.
    """
    after = jnp.cumsum(counts, dtype=jnp.int32)
    before = after - counts
    step = jnp.minimum(lax.iota(jnp.int32, length), after[-1] - 1)
    mine = (step[:, None] >= before[None]) & (step[:, None] < after[None])  # [v, g]

    def of_group(values: Array) -> Array:
        return jnp.sum(jnp.where(mine, values[None], 0), axis=1, dtype=jnp.int32)

    tiles = jnp.maximum(of_group(_tile(starts, tile) - before) + step, 0)
    group = of_group(lax.iota(jnp.int32, len(starts)))
    start = jnp.clip(of_group(starts) - tiles * tile, 0, tile)
    end = jnp.clip(of_group(ends) - tiles * tile, 0, tile)
    nothing = jnp.zeros_like(group)
    return Visits(group, tiles, tiles, start, end, nothing, nothing), after[-1]


def _tile(rows: Array, tile: int) -> Array:
    """Returns the tile of each row; for rows, which are not negative, `//` would be slower."""
    return lax.div(rows, jnp.full_like(rows, tile))


def _changes(key: Array, count: Array) -> tuple[Array, Array]:
    """Returns, as 1 or 0, where a run of equal keys begins and where it ends."""
    step = lax.iota(jnp.int32, len(key))
    differs = key[1:] != key[:-1]
    edge = jnp.ones_like(differs, shape=(1,))
    first = jnp.concatenate([edge, differs])
    last = jnp.concatenate([differs, edge]) | (step == count - 1)
    return first.astype(jnp.int32), last.astype(jnp.int32)
