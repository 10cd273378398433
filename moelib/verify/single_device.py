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
from moelib.core.param import specs_by_path
from moelib.layers.moe.balance import LoadBalanceLoss, RouterZLoss
from moelib.models.causal_lm import CausalLM
from moelib.models.huggingface.families import NoFamilyError
from moelib.parallel.mesh import HybridMeshShape
from moelib.train.pretrained import save_pretrained, state_from_hugging_face
from moelib.verify import batches
from moelib.verify.compare import Difference, first_bit_difference, first_difference
from moelib.verify.mesh_checks import TOLERANCE, rounding_floor, untrained
from moelib.verify.outcome import FaultError, NotApplicableError
from moelib.verify.reference import Reference
from moelib.verify.step_probe import Probe

Check = tuple[str, Callable[[], Difference | None]]


def early_checks(cfg: Any, probe: Probe, initial: Any) -> Iterator[Check]:
    """Yields those of the checks that need no step, only the state as a run begins."""
    yield "rules", functools.partial(_check_mesh_rules, cfg)
    yield "initial", functools.partial(_check_initial, probe, initial.model)


def single_checks(cfg: Any, reference: Reference) -> Iterator[Check]:
    """Yields (name, check): it returns the first difference or None, or raises `FaultError`."""
    ours = _Checks(cfg, reference)
    yield "reached", ours.reached
    yield "auxiliary", ours.auxiliary
    yield "masked", ours.masked
    yield "padding", ours.padding
    yield "doubled", ours.doubled
    yield "packing", ours.packing
    yield "hosts", ours.hosts
    yield "exported", ours.exported


class _Checks:
    def __init__(self, cfg: Any, reference: Reference) -> None:
        self._cfg, self._reference = cfg, reference
        vocab_size = dict(cfg.model.items()).get("vocab_size") or 64
        self._vocab_size: int = vocab_size
        self._batch = reference.batches[0]
        self._specs = specs_by_path(reference.probe.trainer.trainer_state_specs.model)

    def reached(self) -> None:
        """Every parameter that is trained has a gradient, each expert's too."""
        idle = [
            name.partition("dead_experts")[0]
            for name, x in self._reference.first.metrics.items()
            if _last(name) == "dead_experts" and x
        ]
        for path, x in tree.flatten_items(self._reference.first.gradients):
            if not np.any(x):
                raise FaultError(
                    f"{path} has no gradient; use it, or declare it frozen: trainable=False in its "
                    "ParameterSpec, or a rule of learner.update_rules."
                )
            axes = self._specs[path].axes
            if "experts" not in axes or any(path.startswith(layer) for layer in idle):
                continue
            parts = np.moveaxis(x, axes.index("experts"), 0)
            without = [i for i, part in enumerate(parts) if not np.any(part)]
            if without:
                raise FaultError(
                    f"{path}: expert {without[0]} was sent tokens, but has no gradient."
                )

    def auxiliary(self) -> Difference | None:
        """The objective is the loss and the auxiliary losses, each of the config's once."""
        known = self._reference
        metrics, arrives = known.first.metrics, known.first.metrics["aux_loss"]
        weights = dict(_auxiliary_losses(known.probe.trainer.model))
        found = known.probe.auxiliary_losses(known.start.model, self._batch)
        least = 0.0
        for path, weight in weights.items():
            if weight and path not in found:
                raise FaultError(
                    f"{path} has weight {weight:g}, but no such loss arrives at the trainer: a "
                    "layer around it drops what its children put out."
                )
            own = re.compile(rf"{re.escape(path)}(/\d+)?")
            least += weight * math.fsum(x for name, x in metrics.items() if own.fullmatch(name))
        if least == 0.0 and arrives == 0.0:
            raise NotApplicableError("no auxiliary losses")
        room = TOLERANCE * least
        if arrives < least - room or (arrives > least + room and found <= weights.keys()):
            raise FaultError(
                f"The auxiliary losses of the config, times their weights, are {least:.9g}, but "
                f"{arrives:.9g} is what arrives in the objective."
            )
        want = {"objective": metrics["loss"] + arrives}
        return first_difference(want, {n: metrics[n] for n in want}, relative=TOLERANCE)

    def masked(self) -> None:
        """Rows of nothing but padding, and whole batches of it, give finite numbers."""
        for what, observed in (
            ("the batch, whose last row is padding", self._reference.first),
            ("a batch of padding only", self._reference.observe(batches.all_padding(self._batch))),
        ):
            parts = {**observed.metrics, **dict(tree.flatten_items(observed.gradients))}
            parts |= {f"new {path}": x for path, x in tree.flatten_items(observed.state.model)}
            for name, x in parts.items():
                if not np.all(np.isfinite(np.asarray(x, np.float64))):
                    raise FaultError(f"{name} is not finite for {what}.")

    def padding(self) -> Difference | None:
        """What padding holds changes nothing."""
        other = batches.with_other_padding(self._batch, self._vocab_size, seed=5)
        return self._same(self._batch, other)

    def doubled(self) -> Difference | None:
        """Rows that are there twice are worth what they are once, with padding in their place."""
        if (rows := len(self._batch["input_ids"])) % 2:
            raise NotApplicableError(f"input.global_batch_size is {rows}, which is odd")
        if why := self._depends_on_rows():
            raise NotApplicableError(why)
        return self._same(batches.twice(self._batch), batches.once(self._batch))

    def _depends_on_rows(self) -> str:
        """Returns why a row may count otherwise in another place of the batch; "" if not."""
        key = np.asarray(self._reference.start.prng_key)
        other = self._reference.observe(self._batch, prng_key=key ^ 1)
        if other.metrics["loss"] != self._reference.first.metrics["loss"]:
            return "the step draws random numbers, others for each row"
        return "" if not _drops(other.metrics) else "tokens are dropped"

    def packing(self) -> Difference | None:
        """The loss of a row's document does not depend on the other documents of the row."""
        for mine, theirs in ((1, 2), (2, 1)):
            batch = batches.labels_of(self._batch, mine)
            other = batches.with_other_document(batch, theirs, self._vocab_size, seed=6)
            observed = [self._reference.observe(each).metrics for each in (batch, other)]
            if any(map(_drops, observed)):
                raise NotApplicableError("tokens are dropped, which ones depends on the whole row")
            want, got = ({f"loss of documents {mine}": each["loss"]} for each in observed)
            if found := first_difference(want, got, relative=TOLERANCE):
                return found
        return None

    def _same(self, a: Any, b: Any) -> Difference | None:
        """Compares losses, loads, gradients and what layers update, of two batches."""
        want, got = self._reference.observe(a), self._reference.observe(b)
        metrics = [{n: x for n, x in o.metrics.items() if _is_mean(n)} for o in (want, got)]
        if found := first_difference(*metrics, relative=TOLERANCE, floor=1e-7):
            return found
        floor = rounding_floor(want.gradients)
        pair = want.gradients, got.gradients
        if found := first_difference(*pair, relative=TOLERANCE, floor=floor):
            return found
        kept = [untrained(each.state.model, want.gradients) for each in (want, got)]
        return first_difference(*kept, relative=TOLERANCE)

    def hosts(self) -> Difference | None:
        """Batches depend on the step alone: on 1, 2 and 4 hosts, and after a restore."""
        made = self._reference.probe.trainer.input
        want = list(itertools.islice(made.iterator(), 3))
        rows = self._cfg.input.global_batch_size
        if rows % 2:
            raise NotApplicableError(f"2 and 4 hosts do not divide input.global_batch_size {rows}")
        for num_hosts in (2,) if rows % 4 else (2, 4):
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
            if len(want) < 2:
                raise NotApplicableError("the input has a single batch")
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
            tree.select(want.model, keep), tree.select(jax.device_get(got.model), keep)
        )


def _check_mesh_rules(cfg: Any) -> None:
    """Every mesh rule is a pattern and a mesh; other rules were checked by what they change."""
    names = cfg.mesh_axis_names
    for i, (pattern, rule) in enumerate(cfg.mesh_rules or ()):
        try:
            re.compile(pattern)
        except re.error as error:
            raise FaultError(f"mesh_rules[{i}]: {pattern!r} is no pattern: {error}.") from None
        if isinstance(rule, ConfigBase):
            try:
                rule.instantiate()(cfg.clone())
            except Exception as error:
                raise FaultError(f"mesh_rules[{i}]: {type(error).__name__}: {error}") from error
            continue
        for shape in rule if isinstance(rule, HybridMeshShape) else (rule,):
            if len(shape) != len(names):
                raise FaultError(
                    f"mesh_rules[{i}]: {shape} has {len(shape)} sizes for the {len(names)} axes "
                    f"{', '.join(names)}; give one size an axis."
                )


def _check_initial(probe: Probe, params: Any) -> None:
    """No two experts begin alike, no two layers, in what is drawn from a key."""
    redrawn = probe.initial(probe.trainer.config.prng_seed + 1).model
    again = dict(tree.flatten_items(jax.device_get(redrawn)))
    drawn = {p: np.asarray(x) for p, x in tree.flatten_items(params) if np.any(x != again[p])}
    specs = specs_by_path(probe.trainer.trainer_state_specs.model)
    known: dict[Any, str] = {}
    for path, x in drawn.items():
        named = [(path, x)]
        for axis, name in enumerate(specs[path].axes):
            if name in ("experts", "layers"):
                parts = [(at, np.moveaxis(part, axis, 0)) for at, part in named]
                named = [(f"{at}, {name} {i}", p) for at, part in parts for i, p in enumerate(part)]
        for at, part in named:
            like = re.sub(r"\d+", "", path), part.shape, part.tobytes()
            if part.size > 1 and (first := known.setdefault(like, at)) != at:
                raise FaultError(
                    f"{first} and {at} begin with the same values, so that they may stay the same; "
                    "draw each from a key of its own."
                )


def _last(name: str) -> str:
    """Returns the last part of a metric's path that is no number."""
    return re.sub(r"(/\d+)+$", "", name).rpartition("/")[2]


def _drops(metrics: Mapping[str, float]) -> bool:
    return any(x for name, x in metrics.items() if _last(name) == "drop_rate")


def _is_mean(name: str) -> bool:
    """Returns whether a metric is one that a batch has as often as its rows are repeated."""
    means = ("objective", "cross_entropy", "load_max_over_mean", "dead_experts", "entropy")
    return _last(name) in means or _last(name).endswith("loss")


def _joined(parts: list[Any]) -> dict[str, Any]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _auxiliary_losses(module: Module, path: str = "") -> Iterator[tuple[str, float]]:
    """Yields (path, weight, which may be 0) of the losses that MoE layers have in their configs."""
    for name in ("load_balance_loss", "router_z_loss"):
        value = dict(module.config.items()).get(name)
        if isinstance(value, LoadBalanceLoss.Config | RouterZLoss.Config):
            yield f"{path}{name}", float(value.weight)
    for name, child in module.children.items():
        yield from _auxiliary_losses(child, f"{path}{name}/")
