"""The objective on one device: its value and gradient against the model in plain parts."""

import functools
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from moelib.core import tree
from moelib.core.tree import Nested
from moelib.verify.compare import Difference, first_difference
from moelib.verify.layer_checks import layers
from moelib.verify.mesh_checks import TOLERANCE
from moelib.verify.outcome import CheckFailedError, CheckSkippedError
from moelib.verify.plain import Plain, Values, wide
from moelib.verify.reference import Reference

_STEP = 1e-7  # Of finite differences: small, so that no token changes its experts.
_GRADIENT_TOLERANCE = 1e-4  # Of a derivative, as a share of the norm of its gradient.


class ObjectiveChecks:
    """The checks of one config."""

    def __init__(self, reference: Reference, is_random: Callable[[], bool]) -> None:
        """Computes nothing. `is_random` returns whether the step draws random numbers."""
        self._known, self._trainer = reference, reference.probe.trainer
        self._is_random = is_random

    @functools.cached_property
    def _keep(self) -> tuple[str, ...]:
        """Parts without a plain form: dispatch that drops, and a scan's own random numbers."""
        drops = any(x for name, x in self._known.first.metrics.items() if "/drop_rate" in name)
        return ("stack",) * self._is_random() + ("dispatcher",) * drops

    @functools.cached_property
    def _plain(self) -> Plain:
        return Plain(self._trainer, self._keep)

    @functools.cached_property
    def _start(self) -> Any:
        start = self._known.start
        return start._replace(model=self._plain.layers_apart(start.model))

    @functools.cached_property
    def _want(self) -> Values:
        return self._plain(self._start, self._known.batches[0])

    def plain(self) -> None:
        """Compares loss, auxiliary losses, metrics and layers' own state with the plain form."""
        first = self._known.first
        want, got = self._want.metrics, self._plain.metrics(first.metrics)
        found = self._first_difference(want, got)
        if found is not None:
            raise CheckFailedError(f"{found}. {self._origin()}")
        after = self._plain.model.end_step_recursively(self._want.params)
        want, got = tree.by_path(after), tree.by_path(self._plain.layers_apart(first.state.model))
        trained = tree.by_path(self._gradients)
        own = {path: x for path, x in want.items() if path not in trained}
        if found := self._first_difference(own, got):
            raise CheckFailedError(f"State that layers update: {found}. {self._origin()}")

    def layers(self) -> Difference | None:
        """Compares routing, auxiliary losses and attention with formulas in NumPy."""
        return layers(self._plain.model, self._start.model)

    def balanced(self) -> None:
        """Checks that the bias of the busiest expert falls, and that of the idlest one rises."""
        before, after = (
            tree.by_path(self._plain.layers_apart(state.model))
            for state in (self._known.start, self._known.first.state)
        )
        found = 0
        for path in after:
            layer, is_bias, _ = path.partition("/router/bias_balancing/bias")
            counts = self._want.metrics.get(f"{layer}/expert_counts")
            if not is_bias or counts is None or np.ptp(counts) < 0.05 * counts.mean():
                continue
            change, found = after[path] - before[path], found + 1
            for expert, sign in ((int(counts.argmax()), -1), (int(counts.argmin()), 1)):
                if change[expert] * sign <= 0:
                    raise CheckFailedError(
                        f"{path} of expert {expert} changes by {change[expert]:g}, although it has "
                        f"{counts[expert]:.0f} assignments, of {counts.mean():.0f} on average."
                    )
        if not found:
            raise CheckSkippedError("no biases that balance experts")

    def _first_difference(self, want: Nested, got: Nested) -> Difference | None:
        """Returns the difference that comes first in the forward pass."""
        paths = [path for path in want if path in got and np.size(want[path])]
        pair = ({path: np.ravel(x[path]) for path in paths} for x in (want, got))
        return first_difference(*map(self._plain.in_order, pair), relative=TOLERANCE, floor=1e-6)

    def _origin(self) -> str:
        """Returns the part of the step that computes something else than its plain form."""
        for part in {"kernels", "dispatcher"} - {*self._keep}:
            other = Plain(self._trainer, (*self._keep, part))(self._start, self._known.batches[0])
            if self._first_difference(self._want.metrics, other.metrics):
                return f"The run's own {part} computes something else."
        return "The layers' loop, scan or recomputation, or the sum over micro-batches, is wrong."

    @functools.cached_property
    def _gradients(self) -> Nested:
        return self._plain.layers_apart(self._known.first.gradients)

    def derivatives(self) -> None:
        """Compares gradients with finite differences, for each parameter of each layer."""
        gradients = self._plain.in_order(tree.by_path(self._gradients))
        norms = {path: float(np.linalg.norm(g)) for path, g in gradients.items()}
        for path in reversed(norms):  # From a wrong layer, errors spread to all before it.
            allowed = _GRADIENT_TOLERANCE * norms[path] + 1e-6 * max(norms.values())
            # Two directions: along one of them, a token may change its experts.
            found = [self._wrong_derivative(path, seed, allowed) for seed in range(2)]
            if all(found):
                raise CheckFailedError(found[0])

    def _wrong_derivative(self, path: str, seed: int, allowed: float) -> str:
        """Returns the error of the derivative along a random direction, "" if there is none."""
        gradient = np.asarray(tree.by_path(self._gradients)[path], np.float64)
        direction = np.random.default_rng((seed, zlib.crc32(path.encode()))).standard_normal(
            gradient.shape
        )
        terms = self._finite_difference(path, direction)
        want, got = sum(terms.values()), float(np.vdot(gradient, direction))
        if abs(want - got) <= allowed:
            return ""
        text = (
            f"{path}: the derivative along a random direction is {got:.6g} by the gradient, and "
            f"{want:.6g} by finite differences: error {abs(want - got):.3g}, allowed {allowed:.3g}."
        )
        for name, term in terms.items():
            if abs(term) > allowed and abs(want - term - got) <= allowed:
                return f"{text} The gradient of {name} is missing."
        return text

    def _finite_difference(self, path: str, direction: np.ndarray) -> dict[str, float]:
        """Returns the derivative of each term of the objective along a direction."""
        ends = []
        for step in (_STEP, -_STEP):
            moved = lambda at, x, step=step: x + step * direction if at == path else x
            model = tree.map_by_path(moved, wide(self._start.model))
            state = self._start._replace(model=model)
            ends.append(self._plain(state, self._known.batches[0]).terms)
        return {name: float(ends[0][name] - ends[1][name]) / (2 * _STEP) for name in ends[0]}
