"""Arrays inside `jax.shard_map(check_vma=True)`: the mesh axes over which each one varies.

Loops need carries that vary as their inputs do, and a custom VJP must return gradients that vary as
its inputs do. Kernels meet both by letting all their inputs vary over the same axes before anything
else: the transpose of that cast sums a replicated input's gradient over the axes. Outside of
`shard_map` nothing varies, and these functions do nothing.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array


def align(*trees: Any) -> tuple[Any, ...]:
    """Returns the trees, each of their arrays varying over every axis over which any varies."""
    arrays = jax.tree.leaves(trees)
    axes = frozenset[str]().union(*(_varying_axes(array) for array in arrays))
    return jax.tree.map(lambda array: _vary(array, axes), trees)


def zeros_like_varying(shape: Sequence[int], dtype: DTypeLike, array: Array) -> Array:
    """Returns zeros that vary over the axes over which `array` does."""
    return _vary(jnp.zeros(shape, dtype), _varying_axes(array))


def _varying_axes(array: Array) -> frozenset[str]:
    aval = jax.typeof(array)
    manual = getattr(aval, "manual_axis_type", None)  # Since jax 0.12; `vma` before.
    return frozenset(aval.vma if manual is None else manual.varying)


def _vary(array: Array, axes: frozenset[str]) -> Array:
    missing = tuple(sorted(axes - _varying_axes(array)))
    return lax.pcast(array, missing, to="varying") if missing else array
