"""Placement of a MoE layer on a mesh: where its tokens, its experts' weights and its output are.

Tokens are sharded by batch and sequence. Weights are gathered in the compute dtype, with two
exceptions: experts stay sharded over the expert axes if the dispatcher reaches those of other
devices, and the hidden dimension stays sharded. The devices along it share tokens; each computes
its part, and the parts are summed.

Shapes: B batch, S sequence, s its part on a device that shares tokens, D model.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from moelib.core.tree import Nested
from moelib.core.varying import vary
from moelib.layers.quantization import divided
from moelib.parallel import sharding
from moelib.parallel.collectives import gather


class Placement(NamedTuple):
    """Mesh axes and shardings of one layer."""

    batch: tuple[str, ...]  # Mesh axes of the batch dimension of tokens.
    sequence: tuple[str, ...]  # Mesh axes of their sequence dimension.
    ffn: tuple[str, ...]  # Mesh axes of the hidden dimension, whose devices share tokens.
    experts: tuple[str, ...]  # Mesh axes over which experts stay sharded; () gathers them.
    num_parts: int  # Number of devices along `ffn`, and of parts of each token's output.
    tokens: PartitionSpec  # Sharding of [B, S, ...].
    is_scattered: bool  # Whether the parts are summed into a sequence that `ffn` shards too.

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes over which the computations of devices differ."""
        return (*self.batch, *self.sequence, *self.ffn)

    @property
    def outputs(self) -> Any:
        """Shardings of the output [B, S, D] and of a count."""
        scattered = PartitionSpec(self.tokens[0], (*self.sequence, *self.ffn))
        return scattered if self.is_scattered else self.tokens, PartitionSpec()

    def gathered(self, splits: Nested, params: Nested, added_once: Sequence[str]) -> Nested:
        """Returns a device's weights: its own experts, and its part of the hidden dimension.

        Weights named in `added_once` are zeros on all but one device along `ffn`.
        """
        keep = (*self.experts, *self.ffn)

        def whole(split: PartitionSpec, weight: Any) -> Any:
            return gather(weight, split, self.axes, keep=keep)

        params = jax.tree.map(whole, splits, params)
        if not self.ffn:
            return params
        is_first = lax.axis_index(self.ffn) == 0
        once = {name: jnp.where(is_first, params[name], 0) for name in added_once if name in params}
        return params | once

    def summed(self, y: Float[Array, "B S D"]) -> Float[Array, "B s D"]:
        """Returns the sum of the parts of a device's tokens, or its share of the sum."""
        if self.is_scattered:
            return lax.psum_scatter(y, self.ffn, scatter_dimension=1, tiled=True)
        return lax.psum(y, self.ffn) if self.ffn else y

    def counted(self, number: Float[Array, ""]) -> Float[Array, ""]:
        """Returns the sum of a count of assignments over all devices."""
        return lax.psum(vary(number, self.axes), self.axes) / self.num_parts

    def at_use(self, splits: Nested, params: Nested) -> tuple[Nested, Nested]:
        """Returns the shardings of the weights, and the weights, on the way to the devices.

        Axes that shard no tokens, such as those for storage only, are gathered by the compiler.
        """
        splits = jax.tree.map(lambda split: sharding.keep_axes(split, self.axes), splits)
        pairs = jax.tree.map(lambda split, x: divided(x, split, self.ffn), splits, params)
        weights, shards = (
            jax.tree.map(lambda _, pair, i=i: pair[i], splits, pairs) for i in (0, 1)
        )
        return shards, weights


def place(
    mesh_shape: Mapping[str, int], shape: Sequence[int], *, expert_parallel: bool, title: str
) -> Placement:
    """Returns the placement of a layer.

    Args:
        mesh_shape: Sizes of the mesh axes.
        shape: Shape of the tokens [B, S, D].
        expert_parallel: Whether the dispatcher reaches experts of other devices. Expert axes that
            shard no tokens then shard the sequence too.
        title: Name of the layer in errors.

    Raises:
        SplitError: If the mesh does not divide batch or sequence.
    """
    names = functools.partial(sharding.mesh_axes, mesh_shape=mesh_shape)
    batch, sequence, ffn = names("batch"), names("sequence"), names("expert_ffn")
    experts = names("experts") if expert_parallel else ()
    sequence += tuple(axis for axis in experts if axis not in (*batch, *sequence))
    rules = {**sharding.current_rules(), "sequence": sequence}
    spec: Any = functools.partial(sharding.partition_spec, mesh_shape=mesh_shape, rules=rules)
    dims, array = ("batch", "sequence", "expert_ffn"), f"tokens of {title}"
    spec(dims, array=array)  # No axis may shard two dimensions.
    tokens = spec(dims[:2], shape=tuple(shape[:2]), array=array)
    num_parts = math.prod(mesh_shape[axis] for axis in ffn)
    num_shards = num_parts * math.prod(mesh_shape[axis] for axis in sequence)
    # The parts are summed into the sharding of the residual stream.
    is_scattered = bool(ffn) and names("residual_sequence") == (*sequence, *ffn)
    is_scattered = is_scattered and shape[1] % num_shards == 0
    return Placement(batch, sequence, ffn, experts, num_parts, tokens, is_scattered)
