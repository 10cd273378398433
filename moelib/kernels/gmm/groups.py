"""Groups of rows: where each begins and ends, and which tiles of rows a kernel visits for it.

Everything here is a sum over comparisons of [v, g], which XLA fuses; nothing is gathered, sorted or
scattered. Calls that share their tile of rows share the result, for XLA computes equal things once.

Shapes: g groups, v visits.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Int32


class Visits(NamedTuple):
    """What a kernel does at each visit of a tile of rows; entries past the number of visits: any.

    Tiles that no group has rows in are visited last, to be filled with zeros: such a visit has no
    rows, and repeats the group and the tile to read of the visit before, so that it reads nothing.
    """

    group: Int32[Array, "v"]
    tile: Int32[Array, "v"]  # To read.
    out_tile: Int32[Array, "v"]  # To write; `tile` in a visit that has rows.
    start: Int32[Array, "v"]  # The group's rows within the tile: from here,
    end: Int32[Array, "v"]  # up to here.
    first: Int32[Array, "v"]  # 1 where a new output begins, else 0.
    last: Int32[Array, "v"]  # 1 where it ends.


def row_ranges(
    group_sizes: Int[Array, "s"],
    num_rows: int,
    num_groups: int | None = None,
    offset: Int[Array, ""] | None = None,
) -> tuple[Int32[Array, "g"], Int32[Array, "g"]]:
    """Returns each group's first row and the row after its last, none past the last of all rows.

    Args:
        group_sizes: Number of rows of each group.
        num_rows: Number of all rows.
        num_groups: Number of groups to return; all by default.
        offset: The first of those; 0 by default.
    """
    sums = jnp.cumsum(group_sizes, dtype=jnp.int32)
    ends = jnp.minimum(sums, num_rows)
    starts = jnp.minimum(sums - group_sizes.astype(jnp.int32), num_rows)
    if offset is not None:
        size = len(group_sizes) if num_groups is None else num_groups
        starts, ends = (lax.dynamic_slice_in_dim(x, offset, size) for x in (starts, ends))
    return starts, ends


def output_visits(
    starts: Int32[Array, "g"], ends: Int32[Array, "g"], num_rows: int, tile: int
) -> tuple[Visits, Int32[Array, ""]]:
    """Returns the visits that write every tile of rows, and their number.

    A group visits each tile in which it has rows; an empty group, none. Then come the tiles in
    which no group has rows.

    Args:
        starts: Each group's first row, as from `row_ranges`.
        ends: The row after its last.
        num_rows: Number of all rows.
        tile: Rows in a tile.
    """
    num_tiles, num_groups = -(-num_rows // tile), len(starts)
    counts = jnp.where(ends > starts, _tile(ends - 1, tile) - _tile(starts, tile) + 1, 0)
    visits, total = _visits(starts, ends, counts, tile, max(num_tiles + num_groups - 1, 1))
    # The groups' rows are one range, so are their tiles: [low, low + used).
    low = _tile(starts[0], tile)
    used = jnp.where(total > 0, _tile(ends[-1] + tile - 1, tile) - low, 0)
    rest = lax.iota(jnp.int32, len(visits.group)) - total
    out_tile = jnp.where(rest < 0, visits.tile, jnp.where(rest < low, rest, rest + used))
    visits = visits._replace(
        out_tile=jnp.where((rest >= 0) & (total == 0), rest, out_tile),
        start=jnp.where(rest < 0, visits.start, 0),
        end=jnp.where(rest < 0, visits.end, 0),
    )
    count = total + num_tiles - used
    first, last = _changes(visits.out_tile, count)
    return visits._replace(first=first, last=last), count


def weight_visits(
    starts: Int32[Array, "g"], ends: Int32[Array, "g"], num_rows: int, tile: int
) -> tuple[Visits, Int32[Array, ""]]:
    """Returns the visits that write something for every group, and their number.

    A group visits each tile in which it has rows; an empty group visits one, and has no rows in it.

    Args:
        starts: Each group's first row, as from `row_ranges`.
        ends: The row after its last.
        num_rows: Number of all rows.
        tile: Rows in a tile.
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
    """Returns `counts` visits of consecutive tiles for each group, then copies of the last.

    With them comes the number of visits that are no copies.
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
    """Returns the tile of each row; rows are not negative, so `//` would only take longer."""
    return lax.div(rows, jnp.full_like(rows, tile))


def _changes(key: Array, count: Array) -> tuple[Array, Array]:
    """Returns, as 1 or 0, where a run of equal keys begins and where it ends."""
    step = lax.iota(jnp.int32, len(key))
    differs = key[1:] != key[:-1]
    edge = jnp.ones_like(differs, shape=(1,))
    first = jnp.concatenate([edge, differs])
    last = jnp.concatenate([differs, edge]) | (step == count - 1)
    return first.astype(jnp.int32), last.astype(jnp.int32)
