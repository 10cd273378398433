"""Inside `jax.shard_map`: one convention for values that are the same on several devices.

Every shard_map of the library checks varying axes (check_vma). What enters a local computation is
made varying over all axes by `vary` first, so that each device computes its own gradient and the
sum over devices happens once, where `vary` is transposed to a psum. A split weight is gathered by
`gather`, whose transpose is a reduce-scatter. Both sums are in the dtype of the arrays: cast to the
compute dtype first, and gradients travel in it.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec


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
        return lax.pcast(x, new, to="varying") if new else x

    return jax.tree.map(mark, tree)


def gather(x: jax.Array, spec: PartitionSpec, *, keep: Sequence[str] = ()) -> jax.Array:
    """Returns an array whose dimensions were split over mesh axes, whole but for those to keep.

    In the backward pass each device's part of the gradients is summed over the devices.

    Args:
        x: This device's part.
        spec: How the whole array is split.
        keep: Mesh axes over which it stays split.

    Raises:
        ValueError: If a dimension is split over axes to keep and, inside them, others.
    """
    for dim, entry in enumerate(spec):
        axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
        gone = tuple(axis for axis in axes if axis not in keep)
        if not gone:
            continue
        if gone != axes:
            raise ValueError(
                f"dimension {dim} is split over {axes}, of which only {keep} are to stay; "
                "split a dimension over axes that all stay, or all go."
            )
        x = lax.all_gather(x, gone, axis=dim, tiled=True)
    return x
