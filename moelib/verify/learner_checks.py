"""The learner against formulas in NumPy: schedule, weight decay, clipping, moments, average, skips.

Kingma and Ba, arXiv:1412.6980, algorithm 1; Loshchilov and Hutter, arXiv:1711.05101, algorithm 2.
"""

import math
import re
from typing import Any

import jax
import numpy as np

from moelib.core import tree
from moelib.core.config import FunctionConfig
from moelib.core.param import specs_by_path
from moelib.learner.learner import UpdateType
from moelib.train.settings import completed
from moelib.verify.compare import Difference, first_difference
from moelib.verify.outcome import CheckSkippedError
from moelib.verify.reference import Reference

Arrays = dict[str, np.ndarray]  # By path.

# Factors of the gradients of each update; NaN is a step to skip.
_FACTORS = (1.0, 100.0, math.nan, 0.5)


def learner(reference: Reference) -> Difference | None:
    """Compares four updates, of which a skip policy skips the third, with NumPy."""
    known, trainer = reference, reference.probe.trainer
    cfg = completed(trainer.config).learner
    formula = _AdamW(cfg, specs_by_path(trainer.trainer_state_specs.model))
    state = known.start
    gradients = tree.by_path(known.first.gradients)
    want = {
        path: np.asarray(x, np.float64)
        for path, x in formula.own(tree.by_path(state.model)).items()
    }
    average, num = None, 0
    for factor in _FACTORS:
        if math.isnan(factor) and cfg.skip is None:
            continue
        given = {path: np.float32(factor) * x for path, x in gradients.items()}
        observed = known.probe(state, known.batches[0], tree.unflatten(given))
        state = state._replace(model=observed.updated, learner=observed.learner)
        state = jax.device_get(state)
        before = want
        if not math.isnan(factor):
            num += 1
            want = formula.updated(want, formula.own(given), num)
            if (decay := cfg.ema.decay) is not None:
                weight = (1 - decay) / (1 - decay**num)
                last = want if average is None else average
                average = {p: (1 - weight) * last[p] + weight * x for p, x in want.items()}
        got = formula.own(tree.by_path(state.model))
        change = max((float(np.abs(x - before[p]).max(initial=0)) for p, x in want.items()))
        name = f" after update {num}" + (" and a skipped one" if math.isnan(factor) else "")
        pairs = [("", want, got)]
        if average is not None:
            pairs.append(
                ("average of ", average, formula.own(tree.by_path(state.learner.ema.params)))
            )
        for kind, a, b in pairs:
            a, b = ({f"{kind}{p}{name}": x for p, x in each.items()} for each in (a, b))
            if found := first_difference(a, b, relative=2**-21, floor=1e-4 * change):
                return found
    return None


class _AdamW:
    """Adam with decoupled weight decay, on clipped gradients."""

    def __init__(self, cfg: Any, specs: dict[str, Any]) -> None:
        """Reads the settings. Raises CheckSkippedError for another optimizer."""
        is_chain = _name(cfg.optimizer) == "chain"
        parts = {
            _name(part): part for part in (cfg.optimizer.args if is_chain else [cfg.optimizer])
        }
        clip, adam = parts.pop("clip_by_global_norm", None), None
        if not isinstance(cfg.optimizer, FunctionConfig) or len(parts) != 1:
            raise CheckSkippedError(f"no formula for the optimizer {' and '.join(parts)}")
        name, adam = parts.popitem()
        if name not in ("adamw_optimizer", "adam_optimizer"):
            raise CheckSkippedError(f"no formula for {name}")
        self._adam, self._specs, self._rules = dict(adam.items()), specs, cfg.update_rules
        self._clip = None if clip is None else (clip.max_norm, clip.eps)
        self._sums: dict[str, list[np.ndarray]] = {}

    def own(self, arrays: dict[str, Any]) -> Arrays:
        """Returns the arrays of parameters that the main optimizer updates."""

        def is_own(path: str) -> bool:
            found = (rule for pattern, rule in self._rules if re.fullmatch(pattern, path))
            return self._specs[path].trainable and next(found, None) in (
                None,
                UpdateType.OPTIMIZERS,
            )

        return {path: np.asarray(x) for path, x in arrays.items() if is_own(path)}

    def updated(self, params: Arrays, gradients: Arrays, step: int) -> Arrays:
        """Returns the parameters after an update, numbered from 1."""
        b1, b2, eps = (self._adam[name] for name in ("b1", "b2", "eps"))
        gradients = {path: np.asarray(g, np.float64) for path, g in gradients.items()}
        if self._clip is not None:
            norm = math.sqrt(sum(float(np.sum(g * g)) for g in gradients.values()))
            if norm > self._clip[0]:
                scale = self._clip[0] / (norm + self._clip[1])
                gradients = {path: g * scale for path, g in gradients.items()}
        rate, new = rate_at(self._adam["learning_rate"], step), {}
        for path, g in gradients.items():
            mean, square = self._sums.setdefault(path, [np.zeros_like(g), np.zeros_like(g)])
            mean, square = b1 * mean + (1 - b1) * g, b2 * square + (1 - b2) * g * g
            self._sums[path] = [mean, square]
            adam = mean / (1 - b1**step) / (np.sqrt(square / (1 - b2**step)) + eps)
            new[path] = params[path] - rate * (adam + self._decay(path) * params[path])
        return new

    def _decay(self, path: str) -> float:
        """Returns the weight decay of a parameter."""
        decay, rules = (
            self._adam.get("weight_decay", 0.0),
            self._adam.get("weight_decay_per_param_scale", ()),
        )
        spec = self._specs[path]
        if callable(rules):
            return decay * rules(spec)
        found = (scale for pattern, scale in rules if re.fullmatch(pattern, path))
        return decay * next(found, spec.weight_decay_scale)


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
        "constant": 1.0,
        "linear": 1 - r,
        "cosine": (1 + math.cos(math.pi * r)) / 2,
        "exponential": 2 * 0.5**r - 1,
        "minus_sqrt": 1 - math.sqrt(r),
    }
    if name == "inverse_sqrt":
        return warm * max(peak * math.sqrt(warmup / max(step, warmup)), end)
    form = cfg["decay"] if name == "wsd" else name
    if form not in forms:
        raise CheckSkippedError(f"no formula for the schedule {name}")
    return warm * (end + forms[form] * (peak - end)) if form != "constant" else warm * peak


def _name(cfg: Any) -> str:
    return getattr(getattr(cfg, "fn", cfg), "__name__", type(cfg).__name__)
