"""Checks on one device: what must not matter does not, and what must does."""

import functools
import itertools
import math
import re
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from moelib.core import tree
from moelib.core.config import FunctionConfig
from moelib.core.config_modifier import apply_mesh_rule
from moelib.core.module import Module
from moelib.core.param import specs_by_path
from moelib.layers.moe.balance import (
    BalanceScope,
    LoadBalanceLoss,
    RouterZLoss,
    balance_pool,
)
from moelib.models.causal_lm import CausalLM
from moelib.models.huggingface.families import NoFamilyError, settings_of
from moelib.parallel.mesh import HybridMeshShape
from moelib.train.pretrained import save_pretrained, state_from_hugging_face
from moelib.verify import batches
from moelib.verify.compare import Difference, first_bit_difference, first_difference
from moelib.verify.data_checks import data
from moelib.verify.layer_checks import kernels
from moelib.verify.learner_checks import learner
from moelib.verify.mesh_checks import TOLERANCE, rounding_floor, untrained_parameters
from moelib.verify.objective_checks import ObjectiveChecks
from moelib.verify.outcome import Check, CheckFailedError, CheckSkippedError
from moelib.verify.reference import Reference
from moelib.verify.step_probe import Probe


def early_checks(cfg: Any, probe: Probe, initial: Any) -> Iterator[Check]:
    """Yields the checks that need the initial state only, and no step."""
    yield "rules", functools.partial(_check_mesh_rules, cfg)
    yield "initial", functools.partial(_check_initial, probe, initial.model)
    yield "scale", functools.partial(_check_scale, probe, initial.model)


def single_device_checks(cfg: Any, reference: Reference) -> Iterator[Check]:
    """Yields the checks that run steps, those nearest to the cause of a failure first.

    A check returns the first difference or None, or raises `CheckFailedError`.
    """
    checks = _SingleDeviceChecks(cfg, reference)
    return ((name, getattr(checks, name)) for name in _CHECKS)


class _SingleDeviceChecks:
    """The checks, in order."""

    def __init__(self, cfg: Any, reference: Reference) -> None:
        self._cfg, self._reference = cfg, reference
        self._vocab_size, self._batch = batches.vocab_size(cfg), reference.batches[0]
        self._specs = specs_by_path(reference.probe.trainer.trainer_state_specs.model)
        self._objective = ObjectiveChecks(reference, lambda: self._is_random)

    def data(self) -> Difference | None:
        """Checks the batches of the config's own input against the documents of its source."""
        return data(self._reference.probe.trainer)

    def kernels(self) -> Difference | None:
        """Compares kernels with NumPy, at blocks' edges, with documents, idle and busy experts."""
        model = self._reference.probe.trainer.model
        return kernels(model, dict(model.config.items()).get("z_loss") or 0.01)

    def layers(self) -> Difference | None:
        """Compares routing, auxiliary losses and attention with formulas in NumPy."""
        return self._objective.layers()

    def plain(self) -> None:
        """Compares the values of a step with those of the model in plain parts."""
        self._objective.plain()

    def derivatives(self) -> None:
        """Compares gradients with finite differences in float64."""
        self._objective.derivatives()

    def learner(self) -> Difference | None:
        """Compares updates of the learner with formulas in NumPy."""
        return learner(self._reference)

    def balanced(self) -> None:
        """Checks the direction in which biases that balance experts move."""
        self._objective.balanced()

    def saved(self) -> Difference | None:
        """Compares, bit for bit, a checkpoint with the state that was saved."""
        known = self._reference
        if self._cfg.checkpointer is None:
            raise CheckSkippedError("no checkpointer")
        got = jax.device_get(known.probe.restore(known.probe, int(known.start.step)))
        return first_bit_difference(known.start, got)

    def reached(self) -> None:
        """Checks that every trained parameter has a gradient, of each expert too."""
        layers_with_dead_experts = [
            name.partition("dead_experts")[0]
            for name, x in self._reference.first.metrics.items()
            if _metric(name) == "dead_experts" and x
        ]
        for path, x in tree.flatten_items(self._reference.first.gradients):
            if not np.any(x):
                raise CheckFailedError(
                    f"{path} has no gradient; use it, or freeze it with trainable=False in its "
                    "ParameterSpec or with a rule of learner.update_rules."
                )
            axes = self._specs[path].axes
            if "experts" not in axes or path.startswith(tuple(layers_with_dead_experts)):
                continue
            parts = np.moveaxis(x, axes.index("experts"), 0)
            if missing := [i for i, part in enumerate(parts) if not np.any(part)]:
                raise CheckFailedError(
                    f"{path}: expert {missing[0]} received tokens, but has no gradient."
                )

    def auxiliary(self) -> Difference | None:
        """Checks that the objective is the loss plus each configured auxiliary loss, once."""
        known = self._reference
        metrics, arrived = known.first.metrics, known.first.metrics["aux_loss"]
        weights = dict(_auxiliary_losses(known.probe.trainer.model))
        found = known.probe.auxiliary_losses(known.start.model, self._batch)
        expected = 0.0
        for path, weight in weights.items():
            if weight and path not in found:
                raise CheckFailedError(
                    f"{path} has weight {weight:g}, but no such loss reaches the trainer: a layer "
                    "around it drops the outputs of its children."
                )
            own = re.compile(rf"{re.escape(path)}(/\d+)?")
            expected += weight * math.fsum(x for name, x in metrics.items() if own.fullmatch(name))
        if expected == 0.0 and arrived == 0.0:
            raise CheckSkippedError("no auxiliary losses")
        margin = TOLERANCE * expected
        too_small, too_large = arrived < expected - margin, arrived > expected + margin
        if too_small or (too_large and found <= weights.keys()):
            raise CheckFailedError(
                f"The configured auxiliary losses times their weights sum to {expected:.9g}, but "
                f"the objective contains {arrived:.9g}."
            )
        want = {"objective": metrics["loss"] + arrived}
        return first_difference(want, {n: metrics[n] for n in want}, relative=TOLERANCE)

    def masked(self) -> None:
        """Checks that sequences and batches of padding only give finite numbers."""
        for name, observed in (
            ("the batch, whose last sequence is padding", self._reference.first),
            ("a batch of padding only", self._reference.observe(batches.all_padding(self._batch))),
        ):
            parts = {**observed.metrics, **dict(tree.flatten_items(observed.gradients))}
            parts |= {f"new {path}": x for path, x in tree.flatten_items(observed.state.model)}
            for path, x in parts.items():
                if not np.all(np.isfinite(np.asarray(x, np.float64))):
                    raise CheckFailedError(f"{path} is not finite for {name}.")

    def padding(self) -> Difference | None:
        """Checks that the content of padding changes nothing."""
        other = batches.with_other_segment(self._batch, 0, self._vocab_size, seed=5)
        return self._compare_batches(self._batch, other)

    def doubled(self) -> Difference | None:
        """Checks that repeated sequences weigh as much as the same ones once, plus padding."""
        if (batch_size := len(self._batch["input_ids"])) % 2:
            raise CheckSkippedError(f"input.global_batch_size={batch_size} is odd")
        if reason := self._dependence_on_order():
            raise CheckSkippedError(reason)
        twice = batches.first_half_twice(self._batch)
        return self._compare_batches(twice, batches.first_half_padded(self._batch), copies=2)

    @functools.cached_property
    def _is_random(self) -> bool:
        """Whether the step depends on its random key."""
        key = np.asarray(self._reference.start.prng_key)
        other = self._reference.observe(self._batch, prng_key=key ^ 1)
        return other.metrics["loss"] != self._reference.first.metrics["loss"]

    def _dependence_on_order(self) -> str:
        """Returns why the order of sequences may matter; "" if it does not."""
        if self._is_random:
            return "the step draws different random numbers for each sequence"
        return "tokens are dropped" if _drops_tokens(self._reference.first.metrics) else ""

    def packing(self) -> Difference | None:
        """Checks that a document's loss does not depend on other documents of its sequence."""
        for layer, _ in self._reference.probe.trainer.model.walk():
            if layer.mixes_documents:
                raise CheckSkippedError(f"{layer.path()} mixes documents by design")
        for mine, other in ((1, 2), (2, 1)):
            batch = batches.with_loss_of(self._batch, mine)
            changed = batches.with_other_segment(batch, other, self._vocab_size, seed=6)
            observed = [self._reference.observe(each).metrics for each in (batch, changed)]
            if any(map(_drops_tokens, observed)):
                raise CheckSkippedError("which tokens are dropped depends on the whole sequence")
            want, got = ({f"loss of documents {mine}": each["loss"]} for each in observed)
            if found := first_difference(want, got, relative=TOLERANCE):
                return found
        return None

    def _compare_batches(self, a: Any, b: Any, copies: int = 1) -> Difference | None:
        """Compares losses, loads, gradients and updates of layers of two batches.

        State of layers may change by `copies` times as much for the first one: a count of tokens.
        """
        known = self._reference
        want, got = known.observe(a), known.observe(b)
        metrics = [{n: x for n, x in o.metrics.items() if _is_mean(n)} for o in (want, got)]
        if found := first_difference(*metrics, relative=TOLERANCE, floor=1e-7):
            return found
        floor = rounding_floor(want.gradients)
        pair = want.gradients, got.gradients
        if found := first_difference(*pair, relative=TOLERANCE, floor=floor):
            return found
        states = (known.start.model, want.state.model, got.state.model)
        start, twice, once = (untrained_parameters(x, want.gradients) for x in states)
        for path, x in once.items():
            counted = start[path] + copies * (x - start[path])
            if first_difference({path: counted}, {path: twice[path]}, relative=TOLERANCE) and (
                found := first_difference({path: twice[path]}, {path: x}, relative=TOLERANCE)
            ):
                return found
        return None

    def hosts(self) -> Difference | None:
        """Checks that batches depend on the step only: on 1, 2 and 4 hosts, and after a restore."""
        source = self._reference.probe.trainer.input
        want = list(itertools.islice(source.iterator(), 3))
        batch_size = self._cfg.input.global_batch_size
        if batch_size % 2:
            raise CheckSkippedError(
                f"input.global_batch_size={batch_size} does not divide over 2 and 4 hosts"
            )
        for num_hosts in (2,) if batch_size % 4 else (2, 4):
            hosts = [source.iterator(host, num_hosts) for host in range(num_hosts)]
            states = []
            for batch in want:
                if found := first_bit_difference(batch, _joined([next(host) for host in hosts])):
                    return found
                states.append([host.state() for host in hosts])
            for host, state in zip(hosts, states[0], strict=True):
                host.restore(state)
            if len(want) < 2:
                raise CheckSkippedError("the input has a single batch")
            if found := first_bit_difference(want[1], _joined([next(host) for host in hosts])):
                return found
        return None

    def exported(self) -> Difference | None:
        """Compares, bit for bit, trained parameters before and after a Hugging Face folder."""
        cfg, probe = self._cfg.model, self._reference.probe
        if not isinstance(cfg, CausalLM.Config):
            raise CheckSkippedError("not a CausalLM")
        try:
            family, _ = settings_of(cfg)
        except NoFamilyError as error:
            raise CheckSkippedError(str(error).partition(";")[0]) from None
        if family.zeros(cfg):
            raise CheckSkippedError(f"{family.architecture} has parameters that the model lacks")
        want = self._reference.start
        with tempfile.TemporaryDirectory() as folder:
            save_pretrained(folder, cfg, jax.device_put(want.model, probe.shardings.model))
            empty = want._replace(model=jax.tree.map(np.zeros_like, want.model))
            empty = jax.device_put(empty, probe.shardings)
            got = state_from_hugging_face(folder, probe.trainer.model)(empty)
        keep = probe.trainer.learner.is_updated
        return first_bit_difference(
            tree.select(want.model, keep), tree.select(jax.device_get(got.model), keep)
        )


_CHECKS = tuple(name for name in vars(_SingleDeviceChecks) if not name.startswith("_"))
SINGLE_DEVICE_CHECKS = ("rules", "initial", "scale", *_CHECKS)


def _check_mesh_rules(cfg: Any) -> None:
    """Checks that every mesh rule is a pattern with a mesh, or a modifier that raises nothing."""
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


def _check_initial(probe: Probe, params: Any) -> None:
    """Checks that no two experts, and no two layers, start with the same random values."""
    redrawn = probe.initial(probe.trainer.config.prng_seed + 1).model
    other = dict(tree.flatten_items(jax.device_get(redrawn)))
    random = {p: np.asarray(x) for p, x in tree.flatten_items(params) if np.any(x != other[p])}
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


def _check_scale(probe: Probe, params: Any) -> None:
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
            found = tree.by_path(params)[f"{path}/{weight}".lstrip("/")]
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


def _metric(name: str) -> str:
    """Returns the last part of a metric's path that is not a number."""
    return re.sub(r"(/\d+)+$", "", name).rpartition("/")[2]


def _drops_tokens(metrics: Mapping[str, float]) -> bool:
    return any(x for name, x in metrics.items() if _metric(name) == "drop_rate")


def _is_mean(name: str) -> bool:
    """Returns whether a metric is a mean over tokens, which repeated sequences do not change."""
    means = ("objective", "cross_entropy", "load_max_over_mean", "dead_experts", "entropy")
    return _metric(name) in means or _metric(name).endswith("loss")


def _joined(parts: list[Any]) -> dict[str, Any]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _auxiliary_losses(module: Module, path: str = "") -> Iterator[tuple[str, float]]:
    """Yields (path, weight) of the auxiliary losses in the configs of MoE layers."""
    for name in ("load_balance_loss", "router_z_loss"):
        value = dict(module.config.items()).get(name)
        if isinstance(value, LoadBalanceLoss.Config) and value.scope is BalanceScope.ALL_LAYERS:
            stack = balance_pool(module)
            above = "" if stack is None else stack.path().replace(".", "/")
            yield f"{above}/{name}".lstrip("/"), float(value.weight)
        elif isinstance(value, LoadBalanceLoss.Config | RouterZLoss.Config):
            yield f"{path}{name}", float(value.weight)
    for name, child in module.children.items():
        yield from _auxiliary_losses(child, f"{path}{name}/")
