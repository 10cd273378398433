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

OTHER = "other"  # Group of the parameters that no regex of named groups matches.


def group_paths(
    paths: Sequence[str], patterns: Sequence[str] | Mapping[str, str], field: str
) -> dict[str, Sequence[str]]:
    """Returns {name: paths} of the groups of parameters that have a norm.

    Args:
        paths: Paths of the parameters that are updated.
        patterns: Regexes of whole paths. In a mapping {name of a group: regex}, the first match
            wins, and parameters without a match are the group "other". In a sequence, a group is
            named by the text of the capture groups, joined by "/"; without any, by the path, which
            is then alone in it.
        field: Name of the config field with the regexes, for errors.

    Raises:
        UserError: If a regex matches no path, or a named group is called "other".
    """
    groups: dict[str, list[str]] = {}
    if isinstance(patterns, Mapping):
        if OTHER in patterns:
            raise UserError(
                f"{field}: {OTHER!r} is the group of the parameters without a match; choose "
                "another name."
            )
        rules = [(regex, name) for name, regex in patterns.items()]
        for path, name in tree.match_rules(paths, rules, default=OTHER, field=field).items():
            groups.setdefault(name, []).append(path)
        return {name: groups[name] for name in (*patterns, OTHER) if name in groups}
    for pattern in patterns:
        try:
            regex = re.compile(pattern)
        except re.error as error:
            raise UserError(f"{field}: {pattern!r} is no regular expression ({error}).") from None
        found = {path: match for path in paths if (match := regex.fullmatch(path))}
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
    """Returns the norms of each group, and the ratio of two of them, float32 scalars.

    They are `gradient_norm/<name>`, `parameter_norm/<name>` of `params`, `update_norm/<name>`, and
    `update_ratio/<name>`, the norm of the update over that of the parameters (0 without an update).
    """

    def difference(new: jax.Array, old: jax.Array) -> jax.Array:
        return new.astype(jnp.float32) - old.astype(jnp.float32)

    trees = (gradients, params, jax.tree.map(difference, new_params, params))
    values = list(map(tree.by_path, trees))
    found = {}
    for name, paths in groups.items():
        gradient, parameter, update = (global_norm([x[path] for path in paths]) for x in values)
        found[f"gradient_norm/{name}"] = gradient
        found[f"parameter_norm/{name}"] = parameter
        found[f"update_norm/{name}"] = update
        found[f"update_ratio/{name}"] = jnp.where(update == 0, 0.0, update / parameter)
    return found
