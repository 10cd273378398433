"""Gathers of sharded weights inside `jax.shard_map`, whose gradients are reduce-scattered.

Every shard_map of the library checks varying axes (check_vma). Inputs of a local computation are
first made varying over all axes by `moelib.core.varying.vary`, whose transpose is a psum. Both sums
are in the dtype of the arrays: cast to the compute dtype first, and gradients are sent in it.
"""

from collections.abc import Sequence

import jax
from jax import lax
from jax.sharding import PartitionSpec

from moelib.core.errors import UserError
from moelib.parallel.sharding import mesh_axes_of


def gather(x: jax.Array, spec: PartitionSpec, *, keep: Sequence[str] = ()) -> jax.Array:
    """Returns an array gathered over all mesh axes that shard it, except those to keep.

    `x` is this device's shard of an array that `spec` shards.

    Raises:
        UserError: If a dimension is sharded over an axis to keep after one to gather.
    """
    for dim, axes in enumerate(mesh_axes_of(spec)):
        gathered = tuple(axis for axis in axes if axis not in keep)
        if axes[len(axes) - len(gathered) :] != gathered:
            raise UserError(
                f"dimension {dim} is sharded over {axes}, of which {tuple(keep)} are kept; change "
                "the sharding rules so that those to keep come first."
            )
        if gathered:
            x = lax.all_gather(x, gathered, axis=dim, tiled=True)
    return x
