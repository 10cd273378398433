"""Where the layers of a pipeline are: by layer in the state, by stage in a step."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moelib.core.errors import UserError
from moelib.core.param import ParameterSpec
from moelib.layers.quantization import QuantizedWeight
from moelib.parallel import sharding
from moelib.parallel.pipeline.engine import AXIS, Layout


class StagePlacement:
    """Moves layers from where the state is stored to the ranks of their stages, and back.

    Ranks store a part of every layer along another dimension, which they exchange for their own
    layers, so that any number of layers may be spread in any order. An array that is not sharded
    over the pipeline is on every rank.

    Args:
        layout: The stages.
        specs: Specs of the parameters, by path.
    """

    def __init__(self, layout: Layout, specs: Mapping[str, ParameterSpec]) -> None:
        self._rows, self.specs = np.array(layout.rows), specs
        self.num_always = min(layout.sizes)  # Blocks that all stages have.
        self._order = np.argsort(self._rows.ravel())[-sum(layout.sizes) :]

    def to_stages(self, path: str, a: jax.Array) -> jax.Array:
        """Returns parameters of layers [L, ...] by stage, [chunks of all ranks, layers, ...]."""
        stored, placed, dim = self._shardings(path)
        rows = np.maximum(self._rows, 0)  # The last layers of a small stage are not used.

        def move(a: jax.Array) -> jax.Array:
            if dim is not None:
                return lax.all_to_all(a[rows], AXIS, 0, dim + 1, tiled=True)
            own = jnp.asarray(rows).reshape(lax.axis_size(AXIS), -1, rows.shape[1])
            return a[own[lax.axis_index(AXIS)]]

        return jax.shard_map(move, in_specs=stored, out_specs=placed, check_vma=False)(a)

    def quantized_to_stages(self, path: str, weight: QuantizedWeight) -> QuantizedWeight:
        """Returns a quantized weight by stage; its scales are whole on each rank."""
        x = weight.quantized
        scales = x.scales[np.maximum(self._rows, 0)]
        scales = lax.with_sharding_constraint(scales, jax.P(AXIS))
        x = dataclasses.replace(x, values=self.to_stages(path, x.values), scales=scales)
        return dataclasses.replace(weight, quantized=x)

    def to_layers(self, path: str, a: jax.Array) -> jax.Array:
        """Returns the inverse of `to_stages`."""
        stored, placed, dim = self._shardings(path)

        def move(a: jax.Array) -> jax.Array:
            if dim is not None:
                return self.in_order(lax.all_to_all(a, AXIS, dim + 1, 0, tiled=True))
            return self.in_order(lax.all_gather(a, AXIS, tiled=True))

        return jax.shard_map(move, in_specs=placed, out_specs=stored, check_vma=False)(a)

    def of_block(self, path: str) -> jax.P:
        """Returns the sharding of a parameter of one block."""
        return jax.P(*self._shardings(path)[1][2:])

    def in_order(self, a: jax.Array) -> jax.Array:
        """Returns layers [L, ...] from [chunks of all ranks, layers, ...]."""
        return a.reshape(-1, *a.shape[2:])[self._order]

    def _shardings(self, path: str) -> tuple[jax.P, jax.P, int | None]:
        """Returns those of [L, ...] and by stage, and the dimension that a rank has a part of."""
        spec, mesh = self.specs[path], jax.sharding.get_abstract_mesh()
        split = sharding.partition_spec(spec.axes, dict(mesh.shape), shape=spec.shape, array=path)
        first, *entries = sharding.mesh_axes_of(split)
        if first:
            raise UserError(
                f"sharding_rules['layers'] is {first}: a pipeline spreads the layers itself; "
                "remove the rule."
            )
        others = [tuple(axis for axis in entry if axis != AXIS) for entry in entries]
        dim = next((i + 1 for i, entry in enumerate(entries) if AXIS in entry), None)
        stored = [
            (*other, AXIS) if AXIS in entry else other
            for other, entry in zip(others, entries, strict=True)
        ]
        return jax.P(None, *stored), jax.P(AXIS, None, *others), dim
