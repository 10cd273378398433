"""Inside `jax.shard_map`: one convention for values that are the same on several devices.

Every shard_map of the library checks varying axes (check_vma). What enters a local computation is
made varying over all axes by `vary` first, so that each device computes its own gradient and the
sum over devices happens once, where `vary` is transposed to a psum.
"""

from collections.abc import Sequence
from typing import Any

import jax


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Returns the mesh axes over which an array differs from device to device."""
    aval = jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)  # Since jax 0.12; `vma` before.
    return frozenset(aval.vma if manual is None else manual.varying)


def vary(tree: Any, axes: Sequence[str]) -> Any:
    """Returns the arrays of a tree marked as varying over the mesh axes; values do not change.

    In the backward pass, gradients are summed over those of the axes that were new to the array.
    """

    def mark(x: jax.Array) -> jax.Array:
        new = tuple(axis for axis in axes if axis not in varying_axes(x))
        return jax.lax.pcast(x, new, to="varying") if new else x

    return jax.tree.map(mark, tree)
