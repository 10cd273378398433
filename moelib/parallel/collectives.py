"""Collectives inside `jax.shard_map`: a split weight is gathered, its gradient reduce-scattered.

Every shard_map of the library checks varying axes (check_vma). What enters a local computation is
made varying over all axes by `moelib.core.varying.vary` first, whose transpose is a psum. Both sums
are in the dtype of the arrays: cast to the compute dtype first, and gradients travel in it.
"""

from collections.abc import Sequence

import jax
from jax import lax
from jax.sharding import PartitionSpec


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
