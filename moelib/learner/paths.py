"""Parts of nested dicts by path: the parameters that one optimizer updates, and back again."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from moelib.core import tree
from moelib.core.param import ParameterSpec, is_spec
from moelib.core.tree import Nested


def select(params: Nested, keep: Callable[[str], bool], prefix: str = "") -> Nested:
    """Returns the leaves whose path "a/b/c" is kept, nested as they were, without empty dicts."""
    kept: Nested = {}
    for name, value in params.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict):
            if inside := select(value, keep, f"{path}/"):
                kept[name] = inside
        elif keep(path):
            kept[name] = value
    return kept


def merge(base: Nested, *others: Nested) -> Nested:
    """Returns `base` with the leaves of the others put in, or put in place of its own."""
    merged = dict(base)
    for other in others:
        for name, value in other.items():
            inside = merged.get(name)
            both = isinstance(value, dict) and isinstance(inside, dict)
            merged[name] = merge(inside, value) if both else value
    return merged


def by_path(params: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Returns {path: leaf}."""
    return dict(tree.flatten_items(params, is_leaf))


def map_by_path(fn: Callable[..., Any], params: Any, *others: Any) -> Any:
    """Returns the tree of fn(path, leaf, ...)."""
    return jax.tree_util.tree_map_with_path(
        lambda path, *leaves: fn(tree.path_string(path), *leaves), params, *others
    )


def specs_by_path(param_specs: Nested | None) -> Mapping[str, ParameterSpec]:
    """Returns {path: spec}; nothing for None."""
    return by_path(param_specs or {}, is_spec)


def batch_axes(spec: ParameterSpec) -> tuple[int, ...]:
    """Returns the dimensions along which a parameter is many independent ones.

    For a weight these are the ones that its fan axes leave out or name as batch (layers of a scan,
    experts, query/key/value); a bias or scale is a batch of vectors along its last dimension.
    """
    dims = range(len(spec.shape))
    if spec.fan_axes is None:
        return tuple(dims)[:-1]
    matrix = (*spec.fan_axes.in_axis, *spec.fan_axes.out_axis)
    return tuple(axis for axis in dims if axis not in matrix)
