"""Gathers of sharded weights inside `jax.shard_map`, whose gradients are reduce-scattered.

Every shard_map of the library checks varying axes (check_vma). Inputs of a local computation are
first made varying over all axes by `moelib.core.varying.vary`, whose transpose is a psum. Gathers
are in the dtype of the arrays, and sums of gradients in it or in the trainer's `reduce_dtype`.
"""

from collections.abc import Sequence

import jax
from jax import lax
from jax.sharding import PartitionSpec

from moelib.core import precision
from moelib.core.errors import UserError
from moelib.core.varying import vary
from moelib.parallel.sharding import mesh_axes_of


def gather(
    x: jax.Array, spec: PartitionSpec, axes: Sequence[str] = (), *, keep: Sequence[str] = ()
) -> jax.Array:
    """Returns a weight gathered over all mesh axes that shard it, except those to keep.

    Args:
        x: This device's shard of it.
        spec: Its sharding.
        axes: Mesh axes over which devices differ; gradients are summed over all of them.
        keep: Mesh axes over which it stays sharded.

    Raises:
        UserError: If a dimension is sharded over an axis to keep after one to gather.
    """
    dims: list[tuple[int, tuple[str, ...]]] = []
    for dim, names in enumerate(mesh_axes_of(spec)):
        gathered = tuple(axis for axis in names if axis not in keep)
        if names[len(names) - len(gathered) :] != gathered:
            raise UserError(
                f"dimension {dim} is sharded over {names}, of which {tuple(keep)} are kept; change "
                "the sharding rules so that those to keep come first."
            )
        if gathered:
            dims.append((dim, gathered))

    def whole(x: jax.Array) -> jax.Array:
        x = vary(x, axes)
        if any(dim for dim, _ in dims):
            x = precision.row_major(x)
        for dim, names in dims:
            x = lax.all_gather(x, names, axis=dim, tiled=True)
        return x

    return precision.gathered(whole, x)
