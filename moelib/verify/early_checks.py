"""Checks of the config and of its initial state, before a step is compiled."""

import math
import re
from typing import Any

import jax
import numpy as np

from moelib.core import tree
from moelib.core.config import FunctionConfig
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


def scale(probe: Probe, initial: Any) -> None:
    """Checks the standard deviation of weights that the layer's `param_init` draws."""
    model = probe.trainer.model
    for layer, _ in model.walk():
        path = layer.path().removeprefix(model.path()).strip(".").replace(".", "/")
        init = layer._inherited("param_init")
        name = "fan_in_normal" if init is None else getattr(init, "fn", init).__name__
        settings = dict(init.items()) if isinstance(init, FunctionConfig) else {}
        for weight, spec in layer._create_layer_parameter_specs().items():
            if spec.initializer is not None or name not in ("fan_in_normal", "normal"):
                continue
            found = tree.by_path(initial.model)[f"{path}/{weight}".lstrip("/")]
            std = settings.get("std", 0.02)
            if name == "fan_in_normal":
                assert spec.fan_axes is not None
                fan_in = math.prod(spec.shape[axis] for axis in spec.fan_axes.in_axis)
                std = settings.get("scale", 1.0) / math.sqrt(fan_in)
            ratio, error = float(np.std(found)) / std, 6 / math.sqrt(2 * found.size)
            if abs(ratio - 1) > error:
                raise CheckFailedError(
                    f"{path}/{weight} starts with {ratio:.3g} times the standard deviation "
                    f"{std:.3g} of its initializer {name}; chance gives up to {1 + error:.2f}."
                )


EARLY_CHECKS = {"rules": rules, "initial": initial, "scale": scale}
