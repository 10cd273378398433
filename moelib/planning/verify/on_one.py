"""What is checked on one device: what must not matter does not, and what must does."""

import functools
import itertools
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from moelib.core import tree
from moelib.core.config import ConfigBase
from moelib.core.module import Module
from moelib.core.param import ParameterSpec
from moelib.learner import paths
from moelib.models.causal_lm import CausalLM
from moelib.models.huggingface.families import NoFamilyError
from moelib.parallel.mesh import HybridMeshShape
from moelib.planning.verify import batches
from moelib.planning.verify.compare import Difference, first_bit_difference, first_difference
from moelib.planning.verify.on_mesh import TOLERANCE, rounding_floor
from moelib.planning.verify.probe import Probe
from moelib.planning.verify.reference import Reference
from moelib.train.pretrained import save_pretrained, state_from_hugging_face


class FaultError(Exception):
    """Something that is wrong with the config; the message says what."""


class NotApplicableError(Exception):
    """A check that the config gives nothing to do; the message says why."""


Check = tuple[str, Callable[[], Difference | None]]


def early_checks(cfg: Any, probe: Probe, initial: Any) -> Iterator[Check]:
    """Yields those of the checks that need no step, only the state as a run begins."""
    specs = paths.specs_by_path(probe.trainer.trainer_state_specs.model)
    yield "rules", functools.partial(_check_mesh_rules, cfg)
    yield "initial", functools.partial(_check_initial, initial.model, specs)


def single_checks(cfg: Any, reference: Reference) -> Iterator[Check]:
    """Yields (name, check): it returns the first difference or None, or raises `FaultError`."""
    ours = _Checks(cfg, reference)
    yield "reached", ours.reached
    yield "auxiliary", ours.auxiliary
    yield "masked", ours.masked
    yield "padding", ours.padding
    yield "packing", ours.packing
    yield "hosts", ours.hosts
    yield "exported", ours.exported


class _Checks:
    def __init__(self, cfg: Any, reference: Reference) -> None:
        self._cfg, self._reference = cfg, reference
        vocab_size = dict(cfg.model.items()).get("vocab_size") or 64
        self._vocab_size: int = vocab_size
        self._batch = reference.batches[0]
        self._specs = paths.specs_by_path(reference.probe.trainer.trainer_state_specs.model)

    def reached(self) -> None:
        """Every parameter that is trained has a gradient, each expert's too."""
        metrics = self._reference.first.metrics
        idle = sum(x for name, x in metrics.items() if _last(name) == "dead_experts")
        for path, x in tree.flatten_items(self._reference.first.gradients):
            if not np.any(x):
                raise FaultError(
                    f"{path} has no gradient; use it, or declare it frozen: trainable=False in its "
                    "ParameterSpec, or a rule of learner.update_rules."
                )
            axes = self._specs[path].axes
            if "experts" not in axes or idle:
                continue
            parts = np.moveaxis(x, axes.index("experts"), 0)
            without = [i for i, part in enumerate(parts) if not np.any(part)]
            if without:
                raise FaultError(
                    f"{path}: expert {without[0]} was sent tokens, but has no gradient."
                )

    def auxiliary(self) -> Difference | None:
        """The objective is the loss and every auxiliary loss of the config, times its weight."""
        metrics = self._reference.first.metrics
        total = 0.0
        for path, weight in _auxiliary_losses(self._reference.probe.trainer.model):
            values = [x for name, x in metrics.items() if re.fullmatch(rf"{path}(/\d+)?", name)]
            if not values:
                raise FaultError(
                    f"{path} has weight {weight:g}, but no such loss arrives at the trainer: a "
                    "layer around it drops what its children put out."
                )
            total += weight * math.fsum(values)
        if total == 0.0 and metrics["aux_loss"] == 0.0:
            raise NotApplicableError("no auxiliary losses")
        want = {"aux_loss": total or metrics["aux_loss"]}
        want["objective"] = metrics["loss"] + want["aux_loss"]
        return first_difference(want, {n: metrics[n] for n in want}, relative=TOLERANCE)

    def masked(self) -> None:
        """Rows of nothing but padding, and whole batches of it, give finite numbers."""
        for what, observed in (
            ("the batch, whose last row is padding", self._reference.first),
            ("a batch of padding only", self._reference.observe(batches.all_padding(self._batch))),
        ):
            parts = {**observed.metrics, **dict(tree.flatten_items(observed.gradients))}
            for name, x in parts.items():
                if not np.all(np.isfinite(x)):
                    raise FaultError(f"{name} is not finite for {what}.")

    def padding(self) -> Difference | None:
        """What padding holds changes nothing, nor how much of it there is."""
        other = batches.with_other_padding(self._batch, self._vocab_size, seed=5)
        if found := self._same(self._batch, other):
            return found
        return self._same(batches.twice(self._batch), batches.once(self._batch), ("num_tokens",))

    def packing(self) -> Difference | None:
        """The loss of a row's second document does not depend on its first."""
        batch = batches.without_first_labels(self._batch)
        other = batches.with_other_first_documents(batch, self._vocab_size, seed=6)
        observed = [self._reference.observe(each).metrics for each in (batch, other)]
        if any(x for each in observed for name, x in each.items() if _last(name) == "drop_rate"):
            raise NotApplicableError("tokens are dropped, which ones depends on the whole row")
        want, got = ({"loss": each["loss"]} for each in observed)
        return first_difference(want, got, relative=TOLERANCE)

    def _same(self, a: Any, b: Any, but: tuple[str, ...] = ()) -> Difference | None:
        """Compares metrics and gradients of two batches on one device."""
        want, got = self._reference.observe(a), self._reference.observe(b)
        pick = lambda values: {n: x for n, x in values.items() if n not in but}
        metrics = pick(want.metrics), pick(got.metrics)
        if found := first_difference(*metrics, relative=TOLERANCE, floor=1e-7):
            return found
        floor = rounding_floor(want.gradients)
        return first_difference(want.gradients, got.gradients, relative=TOLERANCE, floor=floor)

    def hosts(self) -> Difference | None:
        """Batches depend on the step alone: on 1, 2 and 4 hosts, and after a restore."""
        made = self._cfg.input.instantiate()
        alone = made.iterator()
        want = [next(alone) for _ in range(3)]
        for num_hosts in (2, 4):
            if self._cfg.input.global_batch_size % num_hosts:
                continue
            hosts = [made.iterator(host, num_hosts) for host in range(num_hosts)]
            states = []
            for batch in want:
                parts = [next(host) for host in hosts]
                found = first_bit_difference(batch, _joined(parts))
                if found:
                    return found
                states.append([host.state() for host in hosts])
            for host, state in zip(hosts, states[0], strict=True):
                host.restore(state)
            if found := first_bit_difference(want[1], _joined([next(host) for host in hosts])):
                return found
        return None

    def exported(self) -> Difference | None:
        """To a folder of Hugging Face and back: every parameter that is trained, bit for bit."""
        cfg, probe = self._cfg.model, self._reference.probe
        if not isinstance(cfg, CausalLM.Config):
            raise NotApplicableError("no CausalLM")
        want = self._reference.start
        with tempfile.TemporaryDirectory() as folder:
            try:
                save_pretrained(folder, cfg, jax.device_put(want.model, probe.places.model))
            except NoFamilyError as error:
                raise NotApplicableError(str(error).partition(";")[0]) from None
            empty = want._replace(model=jax.tree.map(np.zeros_like, want.model))
            empty = jax.device_put(empty, probe.places)
            got = state_from_hugging_face(folder, probe.trainer.model)(empty)
        keep = probe.trainer.learner.is_updated
        return first_bit_difference(
            paths.select(want.model, keep), paths.select(jax.device_get(got.model), keep)
        )


def _check_mesh_rules(cfg: Any) -> None:
    """Every mesh rule is a pattern and a mesh; other rules were checked by what they change."""
    names = cfg.mesh_axis_names
    for i, (pattern, rule) in enumerate(cfg.mesh_rules or ()):
        try:
            re.compile(pattern)
        except re.error as error:
            raise FaultError(f"mesh_rules[{i}]: {pattern!r} is no pattern: {error}.") from None
        for shape in rule if isinstance(rule, HybridMeshShape) else (rule,):
            if not isinstance(shape, ConfigBase) and len(shape) != len(names):
                raise FaultError(
                    f"mesh_rules[{i}]: {shape} has {len(shape)} sizes for the {len(names)} axes "
                    f"{', '.join(names)}; give one size an axis."
                )


def _check_initial(params: Any, specs: Mapping[str, ParameterSpec]) -> None:
    """No two experts begin alike, no two layers, unless all entries are equal on purpose."""
    for path, x in tree.flatten_items(params):
        for axis, name in enumerate(specs[path].axes):
            if name not in ("experts", "layers") or not specs[path].trainable:
                continue
            parts = np.moveaxis(np.asarray(x), axis, 0)
            if np.ptp(parts[0]) == 0 or parts[0].size < 2:
                continue
            for i, j in itertools.combinations(range(len(parts)), 2):
                if np.array_equal(parts[i], parts[j]):
                    raise FaultError(
                        f"{path}: {name} {i} and {j} begin with the same values, so that they "
                        "stay the same; draw each from a key of its own."
                    )


def _last(name: str) -> str:
    """Returns the last part of a metric's path that is no number."""
    return re.sub(r"(/\d+)+$", "", name).rpartition("/")[2]


def _joined(parts: list[Any]) -> dict[str, Any]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _auxiliary_losses(module: Module, path: str = "") -> Iterator[tuple[str, float]]:
    """Yields (path, weight) of the losses that layers have in their configs."""
    for name, value in dict(module.config.items()).items():
        weight = dict(value.items()).get("weight") if isinstance(value, ConfigBase) else None
        if name.endswith("_loss") and isinstance(weight, int | float) and weight:
            yield f"{path}{name}", float(weight)
    for name, child in module.children.items():
        yield from _auxiliary_losses(child, f"{path}{name}/")
