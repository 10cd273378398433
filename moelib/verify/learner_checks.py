"""The learner against formulas in NumPy: schedule, weight decay, clipping, moments, average, skips.

Kingma and Ba, arXiv:1412.6980, algorithm 1; Loshchilov and Hutter, arXiv:1711.05101, algorithm 2;
Chen et al., arXiv:2302.06675, program 1.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from moelib.core import tree
from moelib.core.config import FunctionConfig
from moelib.core.param import specs_by_path
from moelib.core.tree import Nested
from moelib.learner.learner import UpdateType
from moelib.train.settings import completed
from moelib.verify.compare import Difference, first_difference
from moelib.verify.outcome import CheckSkippedError
from moelib.verify.reference import Reference

Arrays = dict[str, np.ndarray]  # By path.


def learner(known: Reference) -> Difference | None:
    """Compares four updates, of which a skip policy skips the third, with NumPy."""
    cfg = completed(known.config).learner
    formula = _Updates(cfg, specs_by_path(known.probe.trainer.trainer_state_specs.model))
    state, gradients = known.start, tree.by_path(known.first.gradients)
    want: Arrays = {path: x.astype(np.float64) for path, x in formula.own(state.model).items()}
    average: Arrays | None = None
    for factor in (1.0, 100.0, math.nan, 0.5):
        is_skipped, before = math.isnan(factor), want
        if is_skipped and cfg.skip is None:
            continue
        given = tree.unflatten({path: np.float32(factor) * x for path, x in gradients.items()})
        observed = jax.device_get(known.probe(state, known.batches[0], given))
        state = state._replace(model=observed.updated, learner=observed.learner)
        if not is_skipped:
            want = formula.updated(want, formula.own(given))
            if (decay := cfg.ema.decay) is not None:
                weight = (1 - decay) / (1 - decay**formula.num_updates)
                last = want if average is None else average
                average = {p: (1 - weight) * last[p] + weight * x for p, x in want.items()}
        change = max(float(np.abs(x - before[p]).max(initial=0)) for p, x in want.items())
        name = f" after update {formula.num_updates}" + " and a skipped one" * is_skipped
        pairs = [("", want, state.model)]
        if average is not None:
            pairs.append(("average of ", average, state.learner.ema.params))
        for kind, a, b in pairs:
            named = [{f"{kind}{p}{name}": x for p, x in c.items()} for c in (a, formula.own(b))]
            if found := first_difference(*named, relative=2**-21, floor=1e-4 * change):
                return found
    return None


class _Updates:
    """Updates of Adam, AdamW in both forms, SGD and Lion, by clipped gradients."""

    def __init__(self, cfg: Any, specs: dict[str, Any]) -> None:
        """Reads the settings. Raises CheckSkippedError for another optimizer."""
        chained = cfg.optimizer.args if _name(cfg.optimizer) == "chain" else [cfg.optimizer]
        parts = {_name(part).removesuffix("_optimizer"): part for part in chained}
        self._clip = dict(clip.items()) if (clip := parts.pop("clip_by_global_norm", None)) else {}
        if len(parts) != 1 or not set(_DIRECTIONS) & parts.keys():
            raise CheckSkippedError(f"no formula for the optimizer {' and '.join(parts)}")
        ((self._kind, optimizer),) = parts.items()
        self._cfg, self._specs, self._rules = dict(optimizer.items()), specs, cfg.update_rules
        self._moments: dict[str, tuple[Any, ...]] = {}
        self.num_updates = 0

    def own(self, params: Nested) -> Arrays:
        """Returns, by path, the parameters that the main optimizer updates."""

        def is_own(path: str) -> bool:
            kinds = (kind for pattern, kind in self._rules if re.fullmatch(pattern, path))
            kind = next(kinds, UpdateType.OPTIMIZERS)
            return self._specs[path].trainable and kind in (None, UpdateType.OPTIMIZERS)

        return {path: np.asarray(x) for path, x in tree.flatten_items(params) if is_own(path)}

    def updated(self, params: Arrays, gradients: Arrays) -> Arrays:
        """Returns the parameters after one more update."""
        self.num_updates += 1
        norm, scale = math.sqrt(sum(np.vdot(g, np.float64(g)) for g in gradients.values())), 1.0
        if self._clip and norm > self._clip["max_norm"]:
            scale = self._clip["max_norm"] / (norm + self._clip["eps"])
        rate, factor, new = self._cfg["learning_rate"], 1.0, {}
        if self._kind == "adamw_decoupled":
            rate, factor = self._cfg["update_schedule"], rate
        rate = rate_at(rate, self.num_updates)
        for path, gradient in gradients.items():
            moments = self._moments.get(path, (0.0, 0.0))
            direction, self._moments[path] = _DIRECTIONS[self._kind](
                self._cfg, np.float64(gradient) * scale, *moments, self.num_updates
            )
            decay = self._decay(path) * params[path]
            new[path] = params[path] - rate * (factor * direction + decay)
        return new

    def _decay(self, path: str) -> float:
        """Returns the weight decay of a parameter."""
        decay, spec = self._cfg.get("weight_decay", 0.0), self._specs[path]
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
    trace = cfg["momentum"] * trace + g
    return g + cfg["momentum"] * trace if cfg["nesterov"] else trace, (trace, 0.0)


def _lion(cfg: Any, g: Any, mean: Any, _: Any, step: int) -> tuple[Any, tuple[Any, Any]]:
    del step
    b1, b2 = cfg["b1"], cfg["b2"]
    return np.sign(b1 * mean + (1 - b1) * g), (b2 * mean + (1 - b2) * g, 0.0)


# The direction of a step, and new moments, of the moments before.
_DIRECTIONS: dict[str, Callable[..., tuple[Any, tuple[Any, Any]]]] = {
    "adam": _adam,
    "adamw": _adam,
    "adamw_decoupled": _adam,
    "sgd": _sgd,
    "lion": _lion,
}


def rate_at(rate: Any, step: int) -> float:
    """Returns a learning rate, of a number or the config of a schedule, at a step from 1.

    Raises CheckSkippedError for schedules that are not of the library.
    """
    if isinstance(rate, int | float):
        return float(rate)
    name, cfg = _name(rate), dict(rate.items()) if isinstance(rate, FunctionConfig) else {}
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
    if (form := cfg["decay"] if name == "wsd" else name) not in forms:
        raise CheckSkippedError(f"no formula for the schedule {name}")
    return warm * (end + forms[form] * (peak - end))


def _name(cfg: Any) -> str:
    return getattr(getattr(cfg, "fn", cfg), "__name__", type(cfg).__name__)
