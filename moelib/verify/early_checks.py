"""Checks of the config and of its initial state, before a step is compiled."""

import math
import re
from typing import Any

import jax
import numpy as np
from scipy.stats import truncnorm

from moelib.core import tree
from moelib.core.config import FunctionConfig
from moelib.core.config_modifier import apply_mesh_rule
from moelib.core.param import ParameterSpec, specs_by_path
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


def scale(probe: Probe, initial: Any) -> None:
    """Checks the standard deviation of weights that `param_init` and `output_init` draw."""
    model, values = probe.trainer.model, tree.by_path(initial.model)
    for layer, _ in model.walk():
        path = layer.path().removeprefix(model.path()).strip(".").replace(".", "/")
        for weight, spec in layer._create_layer_parameter_specs().items():
            init = layer._inherited("param_init")
            if spec.initializer is not None:
                if spec.initializer is not layer._initializer("output_init"):
                    continue
                init = layer._inherited("output_init") or init
            name = "fan_in_normal" if init is None else getattr(init, "fn", init).__name__
            settings = dict(init.items()) if isinstance(init, FunctionConfig) else {}
            if (std := _std(name, settings, spec)) is None:
                continue
            found = values[f"{path}/{weight}".lstrip("/")]
            spread, error = float(np.std(found)), 6 / math.sqrt(2 * found.size)
            if abs(spread - std) > error * std:
                raise CheckFailedError(
                    f"{path}/{weight} starts with the standard deviation {spread:.3g}, not with "
                    f"{std:.3g} as its initializer {name}; chance explains {error:.0%}."
                )


def _std(name: str, settings: dict[str, Any], spec: ParameterSpec) -> float | None:
    """Returns the standard deviation that an initializer draws with; None if it is unknown."""
    if name == "constant":
        return 0.0
    if name == "normal":
        return settings.get("std", 0.02)
    if name == "truncated_normal":
        bound = settings.get("bound", 3.0)
        return settings.get("std", 0.02) * float(truncnorm.std(-bound, bound))
    if name != "fan_in_normal" or spec.fan_axes is None:
        return None
    fan_in = math.prod(spec.shape[axis] for axis in spec.fan_axes.in_axis)
    return settings.get("scale", 1.0) / math.sqrt(fan_in)


EARLY_CHECKS = {"rules": rules, "initial": initial, "scale": scale}
