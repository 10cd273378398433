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
from moelib.layers.embedding import Embedding
from moelib.layers.norm import BaseNorm
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
    """Checks mean and deviation of drawn weights; norms of the library start at 1, biases at 0."""
    model, values = probe.trainer.model, tree.by_path(initial.model)
    for layer, _ in model.walk():
        path = layer.path().removeprefix(model.path()).strip(".").replace(".", "/")
        for weight, spec in layer._create_layer_parameter_specs().items():
            init, name = layer._inherited("param_init"), f"{path}/{weight}".lstrip("/")
            if spec.initializer is not None and spec.fan_axes is None and _is_own(layer):
                _check_start(name, values[name], float(isinstance(layer, BaseNorm)), "constant")
                continue
            if spec.initializer is not None:
                if spec.initializer is not layer._initializer("output_init"):
                    continue
                init = layer._inherited("output_init") or init
            kind = "fan_in_normal" if init is None else getattr(init, "fn", init).__name__
            settings = dict(init.items()) if isinstance(init, FunctionConfig) else {}
            fan_in = _fan_in(layer, weight, spec)
            if (std := _std(kind, settings, fan_in)) is not None:
                mean = settings.get("value", 0.0) if kind == "constant" else 0.0
                _check_start(name, values[name], mean, kind, std)


def _check_start(path: str, found: Any, mean: float, init: str, std: float = 0.0) -> None:
    """Raises CheckFailedError unless values have a mean and a deviation, but for chance."""
    found = np.float64(found)
    chance = 6 * std / math.sqrt(found.size)  # Six standard deviations of the mean.
    for what, got, want, allowed in (
        ("mean", found.mean(), mean, chance),
        ("standard deviation", found.std(), std, chance / math.sqrt(2)),
    ):
        if not abs(got - want) <= allowed + 1e-6 * abs(mean):
            raise CheckFailedError(
                f"{path} starts with the {what} {got:.3g}, not with {want:.3g} as its initializer "
                f"{init}; chance explains a difference of {allowed:.2g}."
            )


def _is_own(layer: Any) -> bool:
    return type(layer).__module__.startswith("moelib.")


def _fan_in(layer: Any, weight: str, spec: ParameterSpec) -> int | None:
    """Returns the number of terms of each sum; of the library's layers by names of weights."""
    if spec.fan_axes is None:
        return None
    if not _is_own(layer):
        return spec.fans()[0]
    if weight == "output":  # Heads and their dimension.
        return math.prod(spec.shape[:-1])
    return spec.shape[1 if type(layer) is Embedding else -2 if weight in ("up", "down") else 0]


def _std(name: str, settings: dict[str, Any], fan_in: int | None) -> float | None:
    """Returns the standard deviation that an initializer draws with; None if it is unknown."""
    if name == "constant":
        return 0.0
    if name == "normal":
        return settings.get("std", 0.02)
    if name == "truncated_normal":
        bound = settings.get("bound", 3.0)
        return settings.get("std", 0.02) * float(truncnorm.std(-bound, bound))
    if name != "fan_in_normal" or fan_in is None:
        return None
    return settings.get("scale", 1.0) / math.sqrt(fan_in)


EARLY_CHECKS = {"rules": rules, "initial": initial, "scale": scale}
