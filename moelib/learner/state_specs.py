"""Logical axes of an optimizer's state: each array is split like the parameter it belongs to."""

import itertools
import logging
import math
from collections.abc import Sequence
from typing import Any

import jax

from moelib.core import tree
from moelib.core.param import Axes, ParameterSpec, specs_by_path
from moelib.core.tree import Nested
from moelib.runtime.progress import format_bytes

logger = logging.getLogger(__name__)

_MAX_REPLICATED = 1024  # Elements of an array, such as a key, that is replicated without a warning.


def state_specs(state: Any, param_specs: Nested) -> Any:
    """Returns the tree of `state` with a ParameterSpec for each array.

    An array belongs to a parameter if its path ends with the parameter's: optimizers keep trees
    like the parameters. It then has the parameter's logical axes or, if it lacks one of the
    dimensions (Adafactor's rows and columns), the axes that remain. Arrays of no parameter, and
    those whose shape fits no part of it, are not split; a warning lists the large ones.
    """
    specs = specs_by_path(param_specs)
    replicated = []

    def spec(path: Sequence[Any], leaf: Any) -> ParameterSpec:
        owner = _owner(path, specs)
        axes = None if owner is None else _axes(path, leaf.shape, owner)
        if axes is None:
            axes = (None,) * len(leaf.shape)
            if math.prod(leaf.shape) > _MAX_REPLICATED:
                replicated.append((tree.path_string(path), leaf))
        return ParameterSpec(tuple(leaf.shape), axes, dtype=leaf.dtype.name, trainable=False)

    specs_of_state = jax.tree_util.tree_map_with_path(spec, state)
    if replicated:
        logger.warning(
            "Every device holds all of %d arrays of the optimizer's state, %s, whose path or shape "
            "matches no parameter: %s",
            len(replicated),
            format_bytes(tree.count_bytes([leaf for _, leaf in replicated])),
            ", ".join(f"{path} {leaf.dtype.name}{list(leaf.shape)}" for path, leaf in replicated),
        )
    return specs_of_state


def _owner(path: Sequence[Any], specs: Any) -> ParameterSpec | None:
    """Returns the spec of the parameter with the longest path at the end of `path`."""
    if isinstance(path[-1], jax.tree_util.GetAttrKey):  # A part of an array in 8 bits.
        path = path[:-1]
    keys = itertools.takewhile(lambda k: isinstance(k, jax.tree_util.DictKey), reversed(path))
    names = [str(key.key) for key in keys][::-1]
    ends = ("/".join(names[start:]) for start in range(len(names)))
    return next((specs[end] for end in ends if end in specs), None)


def _axes(path: Sequence[Any], shape: tuple[int, ...], owner: ParameterSpec) -> Axes | None:
    """Returns the logical axes of an array of this shape that belongs to `owner`, if it fits."""
    if len(shape) == len(owner.shape):  # Reduced dimensions may have been kept, with size 1.
        sizes = zip(shape, owner.shape, owner.axes, strict=True)
        return tuple(axis if size == full else None for size, full, axis in sizes)
    removed = [
        i for i in range(len(owner.shape)) if owner.shape[:i] + owner.shape[i + 1 :] == shape
    ]
    if not removed:
        return None
    removed = [i for i in removed if i not in owner.batch_axes] or removed
    # Both dimensions of a square matrix fit: rows are means over the last one, columns are not.
    fields = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
    i = removed[-1] if any("row" in field for field in fields) else removed[0]
    return owner.axes[:i] + owner.axes[i + 1 :]
