"""Where an optimizer's state lies: each array of it like the parameter that it belongs to."""

from collections.abc import Sequence
from typing import Any

import jax

from moelib.core.param import Axes, ParameterSpec, specs_by_path
from moelib.core.tree import Nested


def state_specs(state: Any, param_specs: Nested) -> Any:
    """Returns the tree of `state` with a ParameterSpec in place of each array.

    An array belongs to a parameter if its path ends with the parameter's: optimizers, Optax's and
    others', keep trees like that of the parameters. It then has the parameter's logical axes; if
    it lacks one of the dimensions (Adafactor's rows and columns), the axes that remain. Arrays of
    no parameter, and those whose shape is like no part of it, are split along no dimension.

    Args:
        state: Arrays or `jax.ShapeDtypeStruct`s.
        param_specs: Nested dict of the parameters' specs.
    """
    specs = specs_by_path(param_specs)

    def spec(path: Sequence[Any], leaf: Any) -> ParameterSpec:
        owner = _owner(path, specs)
        axes = (None,) * len(leaf.shape) if owner is None else _axes(path, leaf.shape, owner)
        return ParameterSpec(tuple(leaf.shape), axes, dtype=leaf.dtype.name, trainable=False)

    return jax.tree_util.tree_map_with_path(spec, state)


def _owner(path: Sequence[Any], specs: Any) -> ParameterSpec | None:
    """Returns the spec of the parameter with the longest path at the end of `path`."""
    names: list[str] = []
    for key in reversed(path):
        if not isinstance(key, jax.tree_util.DictKey):
            break
        names.insert(0, str(key.key))
    for start in range(len(names)):
        if (owner := specs.get("/".join(names[start:]))) is not None:
            return owner
    return None


def _axes(path: Sequence[Any], shape: tuple[int, ...], owner: ParameterSpec) -> Axes:
    """Returns the logical axes of an array of this shape that belongs to `owner`."""
    if len(shape) == len(owner.shape):  # Reduced dimensions may have been kept, with size 1.
        sizes = zip(shape, owner.shape, owner.axes, strict=True)
        return tuple(axis if size == full else None for size, full, axis in sizes)
    dropped = [
        i for i in range(len(owner.shape)) if owner.shape[:i] + owner.shape[i + 1 :] == shape
    ]
    if not dropped:
        return (None,) * len(shape)
    stacked = owner.batch_axes
    dropped = [i for i in dropped if i not in stacked] or dropped
    # In a square matrix either dimension would fit: rows are means over the last, columns not.
    fields = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
    i = dropped[-1] if any("row" in field for field in fields) else dropped[0]
    return owner.axes[:i] + owner.axes[i + 1 :]
