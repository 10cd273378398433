"""Which windows of rows a GPU's kernel visits for which group.

A group's windows begin at the multiple of 8 at or before its first row, for that is where the copy
engine can begin a block for the tensor cores. So a group visits few rows that are not its own: 3.5
on average before its first, and half a window after its last.

Shapes: g groups, v visits.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

ALIGNED_ROWS = 8


class RowVisits(NamedTuple):
    """What a kernel does at each visit; entries past the number of visits: any."""

    group: Int32[Array, "v"]  # -1 for rows of no group, which become zeros.
    row: Int32[Array, "v"]  # The window's first row, a multiple of 8.
    start: Int32[Array, "v"]  # The group's first row.
    end: Int32[Array, "v"]  # The row after its last.


def aligned(rows: Array) -> Array:
    """Returns the multiples of 8 at or before rows."""
    return rows - lax.rem(rows, jnp.full_like(rows, ALIGNED_ROWS))


def row_visits(
    starts: Int32[Array, "g"], ends: Int32[Array, "g"], num_rows: int, window: int
) -> tuple[RowVisits, Int32[Array, "1"]]:
    """Returns visits, in each of which a group's rows in a window are written, and their number.

    Each row is written in one visit: its group's, or one of no group.

    Args:
        starts: Each group's first row, as from `row_ranges`.
        ends: The row after its last.
        num_rows: Number of all rows.
        window: Rows in a window: 64 or more.
    """
    num_groups = len(starts)
    # The rows before the first group held and after the last are two more ranges, of no group.
    none = jnp.full_like(starts, -1, shape=(1,))
    group = jnp.concatenate([none, lax.iota(jnp.int32, num_groups), none])
    first = jnp.concatenate([jnp.zeros_like(none), starts, ends[-1:]])
    after = jnp.concatenate([starts[:1], ends, jnp.full_like(none, num_rows)])
    low = aligned(first)
    counts = lax.div(after - low + (window - 1), jnp.full_like(low, window))
    counts = jnp.where(after > first, counts, 0)
    done = jnp.cumsum(counts, dtype=jnp.int32)
    before = done - counts
    # A range of r rows has at most (r + 7 + window - 1) / window windows.
    step = lax.iota(jnp.int32, num_rows // window + (num_groups + 2) * 9 // 8 + 1)
    mine = (step[:, None] >= before[None]) & (step[:, None] < done[None])  # [v, g + 2]

    def of_range(values: Array) -> Array:
        return jnp.sum(jnp.where(mine, values[None], 0), axis=1, dtype=jnp.int32)

    row = of_range(low - before * window) + step * window
    return RowVisits(of_range(group), row, of_range(first), of_range(after)), done[-1:]
