"""Trees of arrays by path: flatten, select, merge, match rules, count."""

import math
import numbers
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moelib.core.config_types import did_you_mean
from moelib.core.errors import UserError

Nested = dict[str, Any]  # A tree of arrays or specs by name.
Batch = dict[str, Any]  # Arrays of one batch by name.


def path_string(path: Sequence[Any]) -> str:
    """Returns a JAX key path as "decoder/layer0/weight"."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def flatten_items(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
    """Returns (path, leaf) of every leaf, paths as "decoder/layer0/weight"."""
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
    return [(path_string(path), leaf) for path, leaf in leaves]


def by_path(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Returns {path: leaf}."""
    return dict(flatten_items(tree, is_leaf))


def map_by_path(fn: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Returns the tree of fn(path, leaf, *leaves of the others)."""
    return jax.tree_util.tree_map_with_path(
        lambda path, *leaves: fn(path_string(path), *leaves), tree, *others
    )


def select(tree: Nested, keep: Callable[[str], bool], prefix: str = "") -> Nested:
    """Returns the leaves for whose path `keep` is true, nested as before, without empty dicts."""
    kept: Nested = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict):
            if inside := select(value, keep, f"{path}/"):
                kept[name] = inside
        elif keep(path):
            kept[name] = value
    return kept


def split(tree: Nested, keep: Callable[[str], bool]) -> tuple[Nested, Nested]:
    """Returns the leaves whose paths `keep` accepts, and the others."""
    return select(tree, keep), select(tree, lambda path: not keep(path))


def merge(base: Nested, *others: Nested) -> Nested:
    """Returns `base` with the leaves of the others added or replaced."""
    merged = dict(base)
    for other in others:
        for name, value in other.items():
            inside = merged.get(name)
            both = isinstance(value, dict) and isinstance(inside, dict)
            merged[name] = merge(inside, value) if both else value
    return merged


def to_nested(tree: Any) -> Nested:
    """Returns any tree as nested dicts keyed by the parts of its paths, without empty parts."""
    return unflatten(dict(flatten_items(tree)))


def unflatten(leaves: Mapping[str, Any]) -> Nested:
    """Returns {"a/b": x} as {"a": {"b": x}}."""
    nested: Nested = {}
    for path, leaf in leaves.items():
        *parents, name = path.split("/")
        inside = nested
        for parent in parents:
            inside = inside.setdefault(parent, {})
        inside[name] = leaf
    return nested


def from_nested(nested: Nested, like: Any) -> Any:
    """Returns the tree with the structure of `like` that `to_nested` turned into `nested`."""
    leaves = by_path(nested)
    return map_by_path(lambda path, _: leaves[path], like)


def mismatch(found: Any, expected: Any, *, dtypes: bool = False) -> str | None:
    """Returns where two trees of arrays differ first, in names, shapes or kinds of numbers.

    Floating-point numbers of any size are of one kind, and so are integers; with `dtypes`, arrays
    differ in any dtype. None if nothing does.
    """
    found, expected = by_path(found), by_path(expected)
    for path in [*expected, *found]:
        a, b = (leaves.get(path) for leaves in (found, expected))
        other = a is None or b is None or shape_and_kind(a) != shape_and_kind(b)
        if other or (dtypes and getattr(a, "dtype", b.dtype) != b.dtype):
            a, b = ("missing" if x is None else array_text(x) for x in (a, b))
            return f"{path!r} is {a} instead of {b}"
    return None


def shape_and_kind(x: Any) -> tuple[Any, ...]:
    """Returns the shape of an array, and whether it is of floats, integers, booleans: 0 or 1 True.

    Anything but an array or a number has the shape () and no True.
    """
    if not hasattr(x, "shape"):
        x = np.asarray(x if isinstance(x, numbers.Number) else None)
    kinds = (jnp.floating, jnp.integer, bool)
    return tuple(x.shape), *(jnp.issubdtype(x.dtype, kind) for kind in kinds)


def array_text(x: Any) -> str:
    """Returns dtype and shape of an array, such as "float32[8, 3]"; the value of anything else."""
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "shape") else f"{x!r:.80}"


def match_rules(
    paths: Iterable[str], rules: Sequence[tuple[str, Any]], *, default: Any, field: str
) -> dict[str, Any]:
    """Returns {path: value of the first rule that matches it, or `default`}.

    Args:
        paths: Paths of leaves.
        rules: Pairs (regular expression for a whole path, value).
        default: Value of the paths that no rule matches.
        field: Name of the config field with the rules, for errors.

    Raises:
        UserError: If a rule matches no path, or only paths that earlier rules match, or is no
            regular expression.
    """
    for regex, _ in rules:
        try:
            re.compile(regex)
        except re.error as error:
            raise UserError(f"{field}: {regex!r} is no regular expression: {error}.") from error
    matches = {
        path: next((i for i, (regex, _) in enumerate(rules) if re.fullmatch(regex, path)), None)
        for path in paths
    }
    for i, (regex, _) in enumerate(rules):
        if i not in matches.values():
            why = did_you_mean(re.sub(r"[^a-zA-Z0-9_/]", "", regex), list(matches)[:200])
            if taken := next((p for p in matches if re.fullmatch(regex, p)), None):
                earlier = next(rule for rule, _ in rules if re.fullmatch(rule, taken))
                why = f"the rule {earlier!r} before it takes {taken!r}; remove one."
            raise UserError(f"{field}: the rule {regex!r} applies to no path; {why}")
    return {path: default if i is None else rules[i][1] for path, i in matches.items()}


def count_elements(tree: Any) -> int:
    """Returns the number of array elements in a tree of arrays or specs."""
    has_shape = lambda value: hasattr(value, "shape")
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree, is_leaf=has_shape))


def count_bytes(tree: Any) -> int:
    """Returns the number of bytes of the arrays or specs of a tree."""
    has_shape = lambda value: hasattr(value, "shape")
    leaves = jax.tree.leaves(tree, is_leaf=has_shape)
    return sum(math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in leaves)
