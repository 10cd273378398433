"""The learner against formulas in NumPy: schedule, weight decay, clipping, moments, average, skips.

Kingma and Ba, arXiv:1412.6980, algorithm 1; Loshchilov and Hutter, arXiv:1711.05101, algorithm 2;
Chen et al., arXiv:2302.06675, program 1.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax

from moelib.core import tree
from moelib.core.config import FunctionConfig
from moelib.core.config_paths import sub_configs
from moelib.core.param import ParameterSpec, specs_by_path
from moelib.layers.external import ExternalLayer
from moelib.learner import optimizers, schedules, transforms
from moelib.learner.learner import UpdateType
from moelib.train.settings import completed
from moelib.verify.compare import Difference, first_difference
from moelib.verify.outcome import CheckSkippedError
from moelib.verify.reference import TOLERANCE, Reference

Arrays = Mapping[str, np.ndarray]  # By path.

# Schedules are compared at these lengths: at both ends of the warmup and of the decay, and inside.
_LENGTHS = {"warmup_steps": 10, "decay_steps": 30, "max_step": 100}
_STEPS = (1, 2, 5, 10, 11, 55, 70, 71, 85, 100, 101)


def learner(known: Reference) -> Difference | None:
    """Compares schedules, and updates of which a skip policy skips some, with NumPy."""
    cfg = completed(known.config).learner
    if found := _schedule_difference(cfg):
        return found
    expected = _Expected(cfg, known.probe.trainer, known.start.model)
    state, gradients = known.start, tree.by_path(known.first.gradients)
    for factor in expected.factors(gradients):
        given = {path: np.float32(factor) * x for path, x in gradients.items()}
        observed = jax.device_get(known.probe(state, known.batches[0], tree.unflatten(given)))
        metrics = expected.metrics(tree.by_path(observed.gradients), observed.metrics)
        change = expected.update(given)
        name = f" after update {expected.num_updates}" + " and a skipped one" * (change == 0)
        pairs: list[tuple[str, Arrays, Any, float]] = [
            ("", expected.fixed, observed.updated, 0.0),
            ("", expected.params, observed.updated, 2**-21),
        ]
        if expected.average is not None:
            pairs.append(("average of ", expected.average, observed.learner.ema.params, 2**-21))
        for kind, want, tree_found, relative in pairs:
            got = tree.by_path(tree_found)
            named = [{f"{kind}{p}{name}": x[p] for p in want} for x in (want, got)]
            floor = 1e-4 * change if relative else 0.0
            if found := first_difference(*named, relative=relative, floor=floor):
                return found
        own = {name: observed.metrics[name] for name in metrics}
        if found := first_difference(metrics, own, relative=TOLERANCE):
            return found
        state = state._replace(model=observed.updated, learner=observed.learner)
    if expected.reasons:
        raise CheckSkippedError("; ".join(expected.reasons))
    return None


class _Expected:
    """The parameters of a learner, in NumPy."""

    def __init__(self, cfg: Any, trainer: Any, params: Any) -> None:
        """Starts from `params`. Raises CheckSkippedError for a skip policy of the user's own."""
        specs = _specs(trainer)
        effects = {UpdateType.NO_UPDATE: None, UpdateType.OPTIMIZERS: ""}
        rules = [
            (pattern, effects[rule] if isinstance(rule, UpdateType) else f"/rule{i}")
            for i, (pattern, rule) in enumerate(cfg.update_rules)
        ]
        # By path: the end of the name of its rate's metric, None without an optimizer.
        self._labels = {
            path: next((x for pattern, x in rules if re.fullmatch(pattern, path)), "")
            if spec.trainable
            else None
            for path, spec in specs.items()
        }
        self._updates: dict[str, _Updates] = {}
        self.reasons: list[str] = []  # Why some parameters have no formula.
        given = {"": cfg.optimizer} | {f"/rule{i}": x for i, (_, x) in enumerate(cfg.update_rules)}
        for label in dict.fromkeys(x for x in self._labels.values() if x is not None):
            try:
                self._updates[label] = _Updates(given[label], specs)
            except CheckSkippedError as reason:
                self.reasons.append(f"{reason}{label and ' of ' + label[1:]}")
        values = tree.by_path(params)
        self.fixed = {p: values[p] for p, label in self._labels.items() if label is None}
        self.params: Arrays = {
            p: values[p].astype(np.float64) for p, x in self._labels.items() if x in self._updates
        }
        self.average: Arrays | None = None
        self.num_updates = 0
        self._decay = cfg.ema.decay
        self._largest_norm = None if cfg.skip is None else _largest_norm(cfg.skip)

    def factors(self, gradients: Arrays) -> list[float]:
        """Returns factors of gradients: one is clipped, and a skip policy skips some."""
        if self._largest_norm is None:
            return [1.0, 100.0, 0.5]
        if math.isinf(self._largest_norm):
            return [1.0, 100.0, math.nan, 0.5]
        unit = self._largest_norm / self._norm(gradients)
        return [0.9 * unit, 1.1 * unit, math.nan, 0.3 * unit]

    def _norm(self, gradients: Arrays) -> float:
        return _norm({p: x for p, x in gradients.items() if self._labels[p] is not None})

    def _takes(self, norm: float) -> bool:
        return self._largest_norm is None or norm <= self._largest_norm

    def metrics(self, gradients: Arrays, known: Mapping[str, float]) -> dict[str, float]:
        """Returns the norm of the next step's gradients, and the learning rates that are known."""
        found = {"gradient_norm": norm} if math.isfinite(norm := self._norm(gradients)) else {}
        rates = {f"learning_rate{label}": x for label, x in self._updates.items()}
        if self._takes(norm):
            found |= {n: x.reported(self.num_updates + 1) for n, x in rates.items() if n in known}
        return found

    def update(self, gradients: Arrays) -> float:
        """Makes one update or skips it; returns the largest change of a parameter."""
        if not self._takes(self._norm(gradients)):
            return 0.0
        self.num_updates += 1
        before, new = self.params, dict[str, np.ndarray]()
        for label, updates in self._updates.items():
            own = {p: gradients[p] for p in before if self._labels[p] == label}
            new |= updates.updated(before, own, self.num_updates)
        self.params = new
        if self._decay is not None:
            weight = (1 - self._decay) / (1 - self._decay**self.num_updates)
            last = new if self.average is None else self.average
            self.average = {p: (1 - weight) * last[p] + weight * x for p, x in new.items()}
        return max((float(np.abs(x - before[p]).max(initial=0)) for p, x in new.items()), default=0)


def _specs(trainer: Any) -> dict[str, ParameterSpec]:
    """Returns specs by path; in layers of the library, only weights with fan axes decay."""
    specs = specs_by_path(trainer.trainer_state_specs.model)
    for path, spec in specs.items():
        layer = trainer.model
        for name in path.split("/"):
            layer = layer.children.get(name, layer)
        is_own = type(layer).__module__.startswith("moelib.")
        if is_own and not isinstance(layer, ExternalLayer):
            scale = float(spec.fan_axes is not None)
            specs[path] = dataclasses.replace(spec, weight_decay_scale=scale)
    return specs


def _norm(gradients: Arrays) -> float:
    return math.sqrt(sum(np.vdot(g, np.float64(g)) for g in gradients.values()))


def _largest_norm(skip: Any) -> float:
    """Returns the gradient norm above which steps are skipped."""
    if _function(skip) is not transforms.skip_bad_steps:
        raise CheckSkippedError(f"no formula for the skip policy {_name(skip)}")
    return math.inf if skip.drop_norm is None else skip.drop_norm


class _Updates:
    """Updates of Adam, AdamW in both forms, SGD and Lion, by clipped gradients."""

    def __init__(self, optimizer: Any, specs: dict[str, ParameterSpec]) -> None:
        """Reads the settings. Raises CheckSkippedError for another optimizer."""
        is_chain = _function(optimizer) is transforms.chain
        *clips, last = optimizer.args if is_chain else [optimizer]
        known = [_function(x) in _CLIPS for x in clips] + [_function(last) in _DIRECTIONS]
        if not all(known):
            names = " and ".join(_name(x) for x in (*clips, last))
            raise CheckSkippedError(f"no formula for the optimizer {names}")
        self._clips = [dict(clip.items()) for clip in clips]
        self._kind, self._cfg, self._specs = _function(last), dict(last.items()), specs
        self._is_decoupled = self._kind is optimizers.adamw_decoupled_optimizer
        self._is_optax = self._kind in (optax.adamw, optax.sgd)
        rate, others = self._cfg["learning_rate"], ("eps_root", "mask", "nesterov")
        if self._is_optax and (
            not isinstance(rate, int | float) or any(map(self._cfg.get, others))
        ):
            raise CheckSkippedError(f"no formula for these settings of optax.{_name(last)}")
        self._moments: dict[str, tuple[Any, ...]] = {}
        self.reported(1)

    def reported(self, step: int) -> float:
        """Returns the learning rate that metrics show at a step."""
        rate = rate_at(self._cfg["learning_rate"], step)
        return rate * rate_at(self._cfg["update_schedule"], step) if self._is_decoupled else rate

    def updated(self, params: Arrays, gradients: Arrays, step: int) -> dict[str, np.ndarray]:
        """Returns the parameters of these gradients after the next update."""
        norm, scale, new = _norm(gradients), 1.0, {}
        for clip in self._clips:
            if norm * scale > clip["max_norm"]:
                scale *= clip["max_norm"] / (norm * scale + clip.get("eps", 0.0))
        rate = self.reported(step)
        decay_rate = rate_at(self._cfg["update_schedule"], step) if self._is_decoupled else rate
        for path, gradient in gradients.items():
            moments = self._moments.get(path, (0.0, 0.0))
            direction, self._moments[path] = _DIRECTIONS[self._kind](
                self._cfg, np.float64(gradient) * scale, *moments, step
            )
            decay = self._decay(path) * params[path]
            new[path] = params[path] - rate * direction - decay_rate * decay
        return new

    def _decay(self, path: str) -> float:
        """Returns the weight decay of a parameter."""
        decay, spec = self._cfg.get("weight_decay", 0.0), self._specs[path]
        if self._is_optax:  # It decays all parameters.
            return decay
        rules = self._cfg.get("weight_decay_per_param_scale", ())
        if callable(rules):
            return decay * rules(spec)
        scales = (scale for pattern, scale in rules if re.fullmatch(pattern, path))
        return decay * next(scales, spec.weight_decay_scale)


def _adam(cfg: Any, g: Any, mean: Any, square: Any, step: int) -> tuple[Any, tuple[Any, Any]]:
    b1, b2 = cfg["b1"], cfg["b2"]
    mean, square = b1 * mean + (1 - b1) * g, b2 * square + (1 - b2) * g * g
    root = np.sqrt(square / (1 - b2**step))
    return mean / (1 - b1**step) / (root + cfg["eps"]), (mean, square)


def _sgd(cfg: Any, g: Any, trace: Any, _: Any, step: int) -> tuple[Any, tuple[Any, Any]]:
    del step
    momentum = cfg["momentum"] or 0.0  # None in Optax.
    trace = momentum * trace + g
    return g + momentum * trace if cfg["nesterov"] else trace, (trace, 0.0)


def _lion(cfg: Any, g: Any, mean: Any, _: Any, step: int) -> tuple[Any, tuple[Any, Any]]:
    del step
    b1, b2 = cfg["b1"], cfg["b2"]
    return np.sign(b1 * mean + (1 - b1) * g), (b2 * mean + (1 - b2) * g, 0.0)


_SCHEDULES = (
    schedules.constant,
    schedules.linear,
    schedules.cosine,
    schedules.inverse_sqrt,
    schedules.wsd,
)
_CLIPS = (transforms.clip_by_global_norm, optax.clip_by_global_norm)

# The direction of a step, and new moments, of the moments before.
_DIRECTIONS: dict[Any, Callable[..., tuple[Any, tuple[Any, Any]]]] = {
    optimizers.adam_optimizer: _adam,
    optimizers.adamw_optimizer: _adam,
    optimizers.adamw_decoupled_optimizer: _adam,
    optimizers.sgd_optimizer: _sgd,
    optimizers.lion_optimizer: _lion,
    optax.adamw: _adam,
    optax.sgd: _sgd,
}


def _schedule_difference(cfg: Any) -> Difference | None:
    """Compares the schedules of a learner's config, made longer, with formulas."""
    for path, inside in sub_configs(cfg):
        if _function(inside) not in _SCHEDULES:
            continue
        fields = dict(inside.items())
        inside = inside.clone(**{name: x for name, x in _LENGTHS.items() if fields.get(name)})
        schedule, name = inside.instantiate(), f"learner.{path} at step "
        want = {f"{name}{step}": rate_at(inside, step) for step in _STEPS}
        found = {f"{name}{step}": float(schedule(step)) for step in _STEPS}
        floor = 1e-6 * max(want.values())
        if difference := first_difference(want, found, relative=1e-6, floor=floor):
            return difference
    return None


def rate_at(rate: Any, step: int) -> float:
    """Returns a learning rate, of a number or the config of a schedule, at a step from 1.

    Raises CheckSkippedError for schedules that are not of the library.
    """
    if isinstance(rate, int | float):
        return float(rate)
    name = _name(rate)
    if _function(rate) not in _SCHEDULES:
        raise CheckSkippedError(f"no formula for the schedule {name}")
    cfg = dict(rate.items())
    peak, end = cfg.get("peak_lr", 1.0), cfg.get("end_lr", 0.0)
    warmup, last = cfg.get("warmup_steps", 0), cfg.get("max_step")
    warm = min(step / warmup, 1.0) if warmup else 1.0
    begin = last - cfg["decay_steps"] if name == "wsd" else warmup
    r = 0.0 if last is None else min(max((step - begin) / (last - begin), 0.0), 1.0)
    forms = {
        "linear": 1 - r,
        "cosine": (1 + math.cos(math.pi * r)) / 2,
        "exponential": 2 * 0.5**r - 1,
        "minus_sqrt": 1 - math.sqrt(r),
    }
    if name == "inverse_sqrt":
        return warm * max(peak * math.sqrt(warmup / max(step, warmup)), end)
    if name == "constant":
        return warm * peak
    return warm * (end + forms[cfg["decay"] if name == "wsd" else name] * (peak - end))


def _function(cfg: Any) -> Any:
    return cfg.fn if isinstance(cfg, FunctionConfig) else None


def _name(cfg: Any) -> str:
    return getattr(_function(cfg) or cfg, "__name__", type(cfg).__name__)
