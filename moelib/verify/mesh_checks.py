"""Checks on each mesh: numbers equal to those of one device, and a state that can be restored."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from moelib.core import tree
from moelib.verify.compare import Difference, first_bit_difference, first_difference
from moelib.verify.outcome import Check, CheckFailedError, CheckSkippedError
from moelib.verify.reference import SAVED_STEP, Reference, curve
from moelib.verify.step_probe import Observed, Probe

# Relative error of float32 sums taken in another order, against the largest entry of the array.
# Observed on eight devices: 2e-6 for gradients, 4e-7 for metrics.
TOLERANCE = 1e-5
_CURVE_TOLERANCE = 1e-4  # Optimizers that divide by small gradients amplify differences.


def mesh_checks(reference: Reference, probe: Probe) -> Iterator[Check]:
    """Yields the checks of `MESH_CHECKS`; each returns the first difference, or None."""
    checks = _MeshChecks(reference, probe)
    return ((name, getattr(checks, name)) for name in MESH_CHECKS)


class _MeshChecks:
    """The checks of one mesh, in order. Each step is taken when a check first needs it."""

    def __init__(self, reference: Reference, probe: Probe) -> None:
        self._reference, self._probe = reference, probe

    @functools.cached_property
    def _first(self) -> Observed:
        known = self._reference
        return self._probe(known.start, known.batches[0], known.first.gradients)

    @functools.cached_property
    def _curve(self) -> tuple[tuple[float, ...], list[Any]]:
        known = self._reference
        return curve(self._probe, known.start, known.batches, known.first.gradients)

    def loss(self) -> Difference | None:
        """Compares the loss and the objective of the first step."""
        names = ("loss", "objective", "num_tokens")
        found = _compare_metrics(self._reference, self._first, lambda name: name in names)
        if found and (first := self.metrics()) and first.leaf != found.leaf:
            raise CheckFailedError(f"{found}. The first layer with another metric: {first}.")
        return found

    def gradients(self) -> Difference | None:
        """Compares the gradient of every parameter."""
        want, got = self._reference.first.gradients, jax.device_get(self._first.gradients)
        apart = map(self._reference.plain.experts_apart, (want, got))
        # Of the last layer that is wrong: from there, errors spread to all before it.
        backward = (dict(reversed(each.items())) for each in apart)
        return first_difference(*backward, relative=TOLERANCE, floor=rounding_floor(want))

    def metrics(self) -> Difference | None:
        """Compares auxiliary losses, expert loads, and all other metrics of layers."""
        return _compare_metrics(self._reference, self._first, lambda _: True)

    def update(self) -> Difference | None:
        """Compares the learner's update by the same gradients, and the updates that layers make."""
        known = self._reference
        ours = jax.device_get(self._first)
        before, got = (dict(tree.flatten_items(x)) for x in (known.start.model, ours.updated))
        largest = 0.0
        for path, want in tree.flatten_items(known.first.updated):
            change = float(np.abs(want - before[path]).max(initial=0.0))
            largest = max(largest, change)
            pair = {path: want}, {path: got[path]}
            if found := first_difference(*pair, relative=2**-22, floor=TOLERANCE * change):
                return found
        state = known.first.learner, ours.learner
        if found := first_difference(*state, relative=TOLERANCE):
            return found
        untrained = [
            untrained_parameters(each.state.model, known.first.gradients)
            for each in (known.first, ours)
        ]
        if found := first_difference(*untrained, relative=TOLERANCE):
            return found
        if not largest:
            raise CheckSkippedError("the first update changes nothing: rate 0, or a skipped step")
        return None

    def curve(self) -> Difference | None:
        """Compares the losses of a few steps, each from the state before it."""
        want = {f"loss of step {i}": x for i, x in enumerate(self._reference.losses)}
        got = dict(zip(want, self._curve[0], strict=True))
        return first_difference(want, got, relative=_CURVE_TOLERANCE)

    def replicas(self) -> Difference | None:
        """Compares, bit for bit, devices that hold the same part of an array."""
        for path, array in tree.flatten_items(self._curve[1][-1]):
            first: dict[str, np.ndarray] = {}
            for shard in array.addressable_shards:
                data = np.asarray(shard.data)
                known = first.setdefault(str(shard.index), data)
                name = f"{path} on device {shard.device.id}"
                if found := first_bit_difference({name: known}, {name: data}):
                    return found
        return None

    def restored(self) -> Difference | None:
        """Compares, bit for bit, a state saved on the mesh and restored on one device; and back."""
        known, probe = self._reference, self._probe
        self._require_checkpointer()
        state = self._curve[1][-2]
        probe.save(state, SAVED_STEP)
        got = known.probe.restore(probe, SAVED_STEP)
        if found := first_bit_difference(jax.device_get(state), jax.device_get(got)):
            return found
        got = probe.restore(known.probe, int(known.start.step))
        return first_bit_difference(known.start, jax.device_get(got))

    def resumed(self) -> Difference | None:
        """Compares, bit for bit, a step after a restore with the same step of the unbroken run."""
        known, probe = self._reference, self._probe
        self._require_checkpointer()
        state = probe.restore(probe, SAVED_STEP)
        after = probe(state, known.batches[-1], known.first.gradients).state
        return first_bit_difference(jax.device_get(self._curve[1][-1]), jax.device_get(after))

    def _require_checkpointer(self) -> None:
        if self._probe.trainer.config.checkpointer is None:
            raise CheckSkippedError("no checkpointer")


MESH_CHECKS = tuple(name for name in vars(_MeshChecks) if not name.startswith("_"))


def rounding_floor(gradients: Any) -> float:
    """Returns the error allowed for gradients that are sums of larger terms, which may cancel."""
    return 1e-7 * max(float(np.abs(x).max(initial=0.0)) for x in jax.tree.leaves(gradients))


def untrained_parameters(params: Any, gradients: Any) -> dict[str, Any]:
    """Returns, by path, the parameters without a gradient, which layers update themselves."""
    trained = dict(tree.flatten_items(gradients))
    return {path: x for path, x in tree.flatten_items(params) if path not in trained}


def _compare_metrics(
    reference: Reference, observed: Observed, keep: Callable[[str], bool]
) -> Difference | None:
    want, got = reference.first.metrics, observed.metrics
    if want.keys() != got.keys():
        raise ValueError(f"metrics on one side only: {sorted(want.keys() ^ got.keys())}.")
    pick = lambda values: {name: values[name] for name in want if keep(name)}
    arrays = (reference.plain.metrics(pick(values)) for values in (want, got))
    return first_difference(*arrays, relative=TOLERANCE, floor=1e-7)
