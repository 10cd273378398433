"""Arrays inside `jax.shard_map(check_vma=True)`: the mesh axes over which each one varies.

Inputs of a local computation are made varying first, so that each device computes its own gradient
and the sum over devices happens once, where the cast is transposed to a psum. Loops need carries
that vary as their inputs do, and a custom VJP must return gradients that vary as its inputs do.
Outside of `shard_map` nothing varies, and these functions do nothing.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike


def varying_axes(array: jax.Array) -> frozenset[str]:
    """Returns the mesh axes over which an array differs from device to device."""
    return frozenset(jax.typeof(array).manual_axis_type.varying)


def vary(tree: Any, axes: Sequence[str]) -> Any:
    """Returns the arrays of a tree marked as varying over the mesh axes; values do not change.

    In the backward pass, gradients are summed over those of the axes that were new to the array.
    """

    def mark(array: jax.Array) -> jax.Array:
        present = varying_axes(array)
        new = tuple(axis for axis in axes if axis not in present)
        return lax.pcast(array, new, to="varying") if new else array

    return jax.tree.map(mark, tree)


def align(*trees: Any) -> tuple[Any, ...]:
    """Returns the trees, each of their arrays varying over every axis over which any varies."""
    axes = frozenset[str]().union(*map(varying_axes, jax.tree.leaves(trees)))
    return vary(trees, sorted(axes))


def zeros_like_varying(shape: Sequence[int], dtype: DTypeLike, array: jax.Array) -> jax.Array:
    """Returns zeros that vary over the axes over which `array` does."""
    return vary(jnp.zeros(shape, dtype), sorted(varying_axes(array)))


def struct_like_varying(
    shape: Sequence[int], dtype: DTypeLike, array: jax.Array
) -> jax.ShapeDtypeStruct:
    """Returns the type of a kernel's result that varies over the axes over which `array` does."""
    manual = jax.typeof(array).manual_axis_type
    return jax.ShapeDtypeStruct(tuple(shape), dtype, manual_axis_type=manual)
