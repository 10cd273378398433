"""Quantized weights of layers: when they are quantized, and how activations are multiplied by them.

A layer names its weights in `BaseLayer.projections`, takes them from `operands`, and multiplies by
`project`. A training step quantizes each weight once, before its micro-batches, in a pipeline too;
elsewhere the layer does it at use.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from moelib.core import precision
from moelib.core.param import Axes, Cast, ParameterSpec, specs_by_path
from moelib.core.tree import Nested, by_path
from moelib.kernels.gmm import gmm
from moelib.kernels.quantized_matmul import (
    TILES,
    Quantization,
    Quantized,
    quantize,
    quantized_gmm,
    quantized_matmul,
)
from moelib.layers.adapter import AdaptedWeight, join_frozen, split_frozen
from moelib.layers.remat import save_dot
from moelib.parallel.sharding import (
    current_mesh,
    keep_axes,
    mesh_axes,
    mesh_axes_of,
    partition_spec,
)

__all__ = [
    "Quantization",
    "QuantizedWeight",
    "batched_project",
    "divided",
    "grouped_project",
    "join_gradients",
    "operand",
    "project",
    "quantize_weight",
    "quantized_weights",
    "split_gradients",
]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """A weight that has been quantized; indexing its stacked dimensions gives one of its parts."""

    quantized: Quantized  # Values of the weight's shape; scales [..., in / block, out / block].
    gradient_of: Any  # Array of the weight's shape that takes its gradient; never read.
    # Logical axes of the last dimensions, for `project`; None leaves gathers to the compiler.
    axes: Axes | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape."""
        return self.quantized.values.shape

    def __getitem__(self, index: Any) -> "QuantizedWeight":
        return jax.tree.map(lambda x: x[index], self)

    def astype(self, dtype: Any) -> "QuantizedWeight":
        """Returns the weight with its gradient in another dtype."""
        return dataclasses.replace(self, gradient_of=self.gradient_of.astype(dtype))

    def matrix(self, num_inputs: int) -> Quantized:
        """Returns [in, out], of a weight whose first dimensions are inputs and others outputs."""
        values, num = self.quantized.values, math.prod(self.shape[:num_inputs])
        return dataclasses.replace(self.quantized, values=values.reshape(num, -1))

    def split(self, num_inputs: int) -> PartitionSpec | None:
        """Returns the sharding of `matrix` in a matmul, over the axes that shard features."""
        mesh = current_mesh()
        if self.axes is None or mesh is None or mesh.size == 1:
            return None
        names, sizes = self.axes[-len(self.shape) :], dict(mesh.shape)
        of_features = *mesh_axes("activation_ffn", sizes), *mesh_axes("activation_heads", sizes)
        entries = mesh_axes_of(keep_axes(partition_spec(names, sizes), of_features))
        return PartitionSpec(sum(entries[:num_inputs], ()), sum(entries[num_inputs:], ()))

    def dequantized(self, dtype: Any, *, num_inputs: int) -> Array:
        """Returns the weight that the quantized values stand for."""
        return self.matrix(num_inputs).dequantized(dtype).reshape(self.shape)


Weight = Array | QuantizedWeight | AdaptedWeight


def divided(weight: Any, split: PartitionSpec, kept: Sequence[str]) -> tuple[Any, Any]:
    """Returns a weight whose scales can be divided over devices, and its sharding.

    Scales are whole along dimensions in blocks, except for those that stay sharded over the mesh
    axes `kept`, along which there is then a scale for each entry.
    """
    if not isinstance(weight, QuantizedWeight):
        return weight, split
    axes = [i for i, names in enumerate(mesh_axes_of(split)) if set(names) & set(kept)]
    scales = weight.quantized.expanded_scales(axes)
    quantized = dataclasses.replace(weight.quantized, scales=scales)
    sizes = zip(split, scales.shape, weight.shape, strict=True)
    of_scales = PartitionSpec(*(entry if num == size else None for entry, num, size in sizes))
    specs = dataclasses.replace(quantized, values=split, scales=of_scales)
    return (
        dataclasses.replace(weight, quantized=quantized),
        dataclasses.replace(weight, quantized=specs, gradient_of=split),
    )


def quantize_weight(weight: Array, spec: ParameterSpec) -> Quantized:
    """Returns a weight quantized by the scheme of its spec, in blocks of its matrices.

    The dimensions of a matrix's inputs are joined, and all dimensions that follow them.
    """
    assert spec.fan_axes is not None, spec
    inputs = spec.fan_axes.in_axis
    shape, stacked = weight.shape, weight.shape[: min(inputs)]
    matrices = weight.reshape(*stacked, math.prod(shape[i] for i in inputs), -1)
    fn = functools.partial(quantize, block=TILES, scheme=spec.quantization)
    for _ in stacked:
        fn = jax.vmap(fn)
    quantized = fn(jax.lax.stop_gradient(matrices))
    return dataclasses.replace(quantized, values=quantized.values.reshape(shape))


def quantized_weights(params: Nested, specs: Nested, dtype: Any) -> dict[str, QuantizedWeight]:
    """Returns the weights that the layers of a model quantize, by path, without `gradient_of`.

    `dtype` is the dtype of the computation; None for the dtypes of the parameters.
    """
    found, leaves = {}, by_path(params)
    for path, spec in specs_by_path(specs).items():
        if spec.quantization is not None and path in leaves:
            weight = leaves[path].astype(dtype or spec.dtype)
            found[path] = QuantizedWeight(quantize_weight(weight, spec), None)
    return found


def split_gradients(params: Any) -> tuple[Any, Any]:
    """Returns the arrays that take the gradients of parameters, and those without, or None.

    The latter are quantized values, and weights with an adapter.
    """

    def split(x: Any) -> tuple[Any, Any]:
        if isinstance(x, AdaptedWeight):
            return split_frozen(x)
        return (x.gradient_of, x.quantized) if isinstance(x, QuantizedWeight) else (x, None)

    leaves, structure = jax.tree.flatten(params, is_leaf=_is_unit)
    pairs = [split(x) for x in leaves]
    return structure.unflatten(p[0] for p in pairs), structure.unflatten(p[1] for p in pairs)


def join_gradients(gradient_of: Any, others: Any) -> Any:
    """Returns the parameters of which `split_gradients` gave the parts."""

    def join(x: Any, other: Any) -> Any:
        if isinstance(x, AdaptedWeight):
            return join_frozen(x, other)
        return x if other is None else QuantizedWeight(other, x)

    return jax.tree.map(join, gradient_of, others, is_leaf=_is_unit)


def _is_unit(x: Any) -> bool:
    return isinstance(x, AdaptedWeight | QuantizedWeight)


def operand(value: Any, spec: ParameterSpec, dtype: Any) -> Any:
    """Returns a parameter as activations of a dtype use it: cast, and quantized if it has a scheme.

    A `QuantizedWeight` keeps its values.
    """
    value = value if spec.cast is Cast.NEVER else value.astype(dtype)
    if spec.quantization is None:
        return value
    if not isinstance(value, QuantizedWeight):
        value = QuantizedWeight(quantize_weight(value, spec), value)
    return dataclasses.replace(value, axes=spec.axes)


def project(x: Float[Array, "... D"], weight: Weight, *, num_inputs: int = 1) -> Array:
    """Returns x W, summed over the last dimensions of x and the first `num_inputs` of W."""
    if isinstance(weight, AdaptedWeight):
        y = project(x, weight.frozen, num_inputs=num_inputs)
        return _sum(y, weight.change(x, num_inputs=num_inputs))
    wide = precision.is_reduced_in_float32(x.dtype)
    if not isinstance(weight, QuantizedWeight):
        return (precision.tensordot if wide else jnp.tensordot)(x, weight, num_inputs)
    lead = x.shape[: x.ndim - num_inputs]
    num = math.prod(weight.shape[:num_inputs])
    tokens = x.reshape(-1, *lead[-1:], num) if lead else x.reshape(1, 1, num)
    out = weight.gradient_of.reshape(num, -1)
    split = weight.split(num_inputs)
    matrix = weight.matrix(num_inputs)
    y = quantized_matmul(tokens, matrix, out, split=split, sums_in_float32=wide)
    return save_dot(y.reshape(*lead, *weight.shape[num_inputs:]))


def _sum(product: Array, change: Array) -> Array:
    """Returns the sum, rounded once: XLA takes a bare sum in bfloat16 twice as long on TPUs."""
    return (product.astype(jnp.float32) + change.astype(jnp.float32)).astype(product.dtype)


def batched_project(rows: Float[Array, "E C D"], weight: Weight) -> Array:
    """Returns the rows of each group times its matrix [E, D, F]."""
    if isinstance(weight, AdaptedWeight):
        change = batched_project(batched_project(rows, weight.a), weight.scaled_b)
        return _sum(batched_project(rows, weight.frozen), change)
    if not isinstance(weight, QuantizedWeight):
        return jnp.einsum("ecd,edf->ecf", rows, weight)
    return quantized_matmul(rows, weight.quantized, weight.gradient_of)


def grouped_project(
    rows: Float[Array, "R D"], weight: Weight, group_sizes: Int[Array, "E"]
) -> list[Array]:
    """Returns rows, sorted by group, times each of the matrices [E, n, D, F] of their groups."""
    if isinstance(weight, AdaptedWeight):
        products = grouped_project(rows, weight.frozen, group_sizes)
        changes = _grouped_changes(rows, weight.a, weight.scaled_b, group_sizes)
        return list(map(_sum, products, changes))
    num = weight.shape[1]
    if not isinstance(weight, QuantizedWeight):
        return [gmm(rows, weight[:, i], group_sizes) for i in range(num)]
    each = [weight[:, i] for i in range(num)]
    return [quantized_gmm(rows, x.quantized, x.gradient_of, group_sizes) for x in each]


def _grouped_changes(
    rows: Float[Array, "R D"],
    a: Float[Array, "E n D r"],
    b: Float[Array, "E n r F"],
    group_sizes: Int[Array, "E"],
) -> list[Array]:
    """Returns (rows A) B of each of n matrices, [R, F].

    The rows are read once, for all A, and no columns are sliced: each B has zeros in the rows of
    the other A.
    """
    groups, num, dim, rank = a.shape
    joined = jnp.moveaxis(a, 1, 2).reshape(groups, dim, num * rank)
    inside = gmm(rows, joined, group_sizes)
    changes = []
    for i in range(num):
        around = (0, 0), (i * rank, (num - 1 - i) * rank), (0, 0)
        changes.append(gmm(inside, jnp.pad(b[:, i], around), group_sizes))
    return changes
