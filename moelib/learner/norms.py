"""Norms of gradients, parameters and updates, per parameter or per group of them."""

import re
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from moelib.core import tree
from moelib.core.config import did_you_mean
from moelib.core.errors import UserError
from moelib.core.tree import Nested
from moelib.learner.transforms import global_norm


def group_paths(
    paths: Sequence[str], patterns: Sequence[str], field: str
) -> dict[str, Sequence[str]]:
    """Returns {name: paths} of the groups of parameters that have a norm.

    Args:
        paths: Paths of the parameters that are updated.
        patterns: Regexes of whole paths. A group is named by the text of the capture groups, joined
            by "/"; without any, by the path, which is then alone in it.
        field: Name of the config field with the regexes, for errors.

    Raises:
        UserError: If a regex matches no path.
    """
    groups: dict[str, list[str]] = {}
    for pattern in patterns:
        found = {path: match for path in paths if (match := re.fullmatch(pattern, path))}
        if not found:
            raise UserError(
                f"{field}: the regex {pattern!r} matches no parameter that is updated; "
                f"{did_you_mean(pattern, paths)}"
            )
        for path, match in found.items():
            groups.setdefault("/".join(filter(None, match.groups())) or path, []).append(path)
    return {name: list(dict.fromkeys(members)) for name, members in groups.items()}


def norms_of(
    groups: Mapping[str, Sequence[str]], gradients: Nested, params: Nested, new_params: Nested
) -> dict[str, jax.Array]:
    """Returns `gradient_norm/<name>`, `parameter_norm/<name>` and `update_norm/<name>`, float32."""
    difference = lambda new, old: new.astype(jnp.float32) - old.astype(jnp.float32)
    values = {
        "gradient_norm": tree.by_path(gradients),
        "parameter_norm": tree.by_path(params),
        "update_norm": tree.by_path(jax.tree.map(difference, new_params, params)),
    }
    return {
        f"{kind}/{name}": global_norm([value[path] for path in paths])
        for kind, value in values.items()
        for name, paths in groups.items()
    }
