"""Checks of the config and of its initial state, before a step is compiled."""

import re
from typing import Any

import jax
import numpy as np

from moelib.core import tree
from moelib.core.config_modifier import apply_mesh_rule
from moelib.core.param import specs_by_path
from moelib.parallel.mesh import HybridMeshShape
from moelib.verify.outcome import CheckFailedError
from moelib.verify.step_probe import Probe


def rules(probe: Probe, initial: Any) -> None:
    """Checks that every mesh rule is a pattern with a mesh, or a modifier that raises nothing."""
    del initial
    cfg = probe.trainer.config
    names = cfg.mesh_axis_names
    for i, (pattern, rule) in enumerate(cfg.mesh_rules or ()):
        try:
            re.compile(pattern)
        except re.error as error:
            raise CheckFailedError(
                f"mesh_rules[{i}]: {pattern!r} is not a regular expression: {error}."
            ) from None
        try:
            mesh = apply_mesh_rule(cfg.clone(), rule).mesh_shape
        except Exception as error:
            raise CheckFailedError(f"mesh_rules[{i}]: {type(error).__name__}: {error}") from error
        for shape in mesh if isinstance(mesh, HybridMeshShape) else (mesh,):
            if len(shape) != len(names):
                raise CheckFailedError(
                    f"mesh_rules[{i}]: {shape} has {len(shape)} sizes for the {len(names)} axes "
                    f"{', '.join(names)}; give one size per axis."
                )


def initial(probe: Probe, initial: Any) -> None:
    """Checks that no two experts, and no two layers, start with the same random values."""
    redrawn = probe.initial(probe.trainer.config.prng_seed + 1).model
    other = dict(tree.flatten_items(jax.device_get(redrawn)))
    random = {
        p: np.asarray(x) for p, x in tree.flatten_items(initial.model) if np.any(x != other[p])
    }
    specs = specs_by_path(probe.trainer.trainer_state_specs.model)
    seen: dict[Any, str] = {}
    for path, x in random.items():
        named = [(path, x)]
        for axis, name in enumerate(specs[path].axes):
            if name in ("experts", "layers"):
                parts = [(at, np.moveaxis(part, axis, 0)) for at, part in named]
                named = [(f"{at}, {name} {i}", p) for at, part in parts for i, p in enumerate(part)]
        for at, part in named:
            key = re.sub(r"\d+", "", path), part.shape, part.tobytes()
            if part.size > 1 and (first := seen.setdefault(key, at)) != at:
                raise CheckFailedError(
                    f"{first} and {at} start with the same values and may stay equal; draw each "
                    "from its own key."
                )


EARLY_CHECKS = {"rules": rules, "initial": initial}
