"""What is checked on every mesh: the same numbers as on one device, and a state that survives."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from moelib.core import tree
from moelib.verify.compare import (
    Difference,
    first_bit_difference,
    first_difference,
)
from moelib.verify.outcome import NotApplicableError
from moelib.verify.reference import SAVED_STEP, Reference, curve
from moelib.verify.step_probe import Observed, Probe

# How far float32 numbers may be apart that are summed in another order, relative to the largest of
# their array. Seen on eight devices: 2e-6 of gradients, 4e-7 of metrics.
TOLERANCE = 1e-5
_CURVE_TOLERANCE = 1e-4  # Optimizers that divide by small gradients make differences larger.

Check = tuple[str, Callable[[], Difference | None]]


MESH_CHECKS = (
    "loss",
    "gradients",
    "metrics",
    "update",
    "curve",
    "replicas",
    "restored",
    "resumed",
)


def mesh_checks(reference: Reference, probe: Probe) -> Iterator[Check]:
    """Yields (name, check) of `MESH_CHECKS`; a check returns the first difference, or None."""
    ours = _Steps(reference, probe)
    for name in MESH_CHECKS:
        yield name, getattr(ours, name)


class _Steps:
    """Some steps on a mesh, each taken when it is first asked for."""

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
        return _compare_metrics(self._reference, self._first, lambda name: name in names)

    def metrics(self) -> Difference | None:
        """Compares auxiliary losses, loads of experts, and all else that layers report."""
        return _compare_metrics(self._reference, self._first, lambda _: True)

    def gradients(self) -> Difference | None:
        """Compares the gradient of every parameter."""
        want, got = self._reference.first.gradients, jax.device_get(self._first.gradients)
        return first_difference(want, got, relative=TOLERANCE, floor=rounding_floor(want))

    def update(self) -> Difference | None:
        """Compares what the learner makes of the same gradients, and what layers update."""
        known = self._reference
        ours = jax.device_get(self._first)
        before, got = (dict(tree.flatten_items(x)) for x in (known.start.model, ours.updated))
        moved = 0.0
        for path, want in tree.flatten_items(known.first.updated):
            move = float(np.abs(want - before[path]).max(initial=0.0))
            moved = max(moved, move)
            pair = {path: want}, {path: got[path]}
            if found := first_difference(*pair, relative=2**-22, floor=TOLERANCE * move):
                return found
        state = known.first.learner, ours.learner
        if found := first_difference(*state, relative=TOLERANCE):
            return found
        kept = [untrained(x.state.model, known.first.gradients) for x in (known.first, ours)]
        if found := first_difference(*kept, relative=TOLERANCE):
            return found
        if not moved:
            raise NotApplicableError("the first update moves nothing: its rate is 0, or is skipped")
        return None

    def curve(self) -> Difference | None:
        """Compares the losses of a few steps, each from the state before it."""
        want = {f"loss of step {i}": x for i, x in enumerate(self._reference.losses)}
        got = dict(zip(want, self._curve[0], strict=True))
        return first_difference(want, got, relative=_CURVE_TOLERANCE)

    def replicas(self) -> Difference | None:
        """Compares, bit for bit, the devices that hold the same part of an array."""
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
        """Saves on the mesh and restores on one device, and the other way: bit for bit."""
        known, probe = self._reference, self._probe
        if probe.trainer.config.checkpointer is None:
            raise NotApplicableError("no checkpointer")
        state = self._curve[1][-2]
        probe.save(state, SAVED_STEP)
        got = known.probe.restored(probe, SAVED_STEP)
        if found := first_bit_difference(jax.device_get(state), jax.device_get(got)):
            return found
        got = probe.restored(known.probe, SAVED_STEP)
        return first_bit_difference(known.start, jax.device_get(got))

    def resumed(self) -> Difference | None:
        """Restores on the mesh and takes a step: the state of the unbroken run, bit for bit."""
        known, probe = self._reference, self._probe
        if probe.trainer.config.checkpointer is None:
            raise NotApplicableError("no checkpointer")
        state = probe.restored(probe, SAVED_STEP)
        after = probe(state, known.batches[-1], known.first.gradients).state
        return first_bit_difference(jax.device_get(self._curve[1][-1]), jax.device_get(after))


def rounding_floor(gradients: Any) -> float:
    """Returns what a gradient may be off that is a sum of larger ones: they may cancel out."""
    return 1e-7 * max(float(np.abs(x).max(initial=0.0)) for x in jax.tree.leaves(gradients))


def _compare_metrics(
    reference: Reference, observed: Observed, keep: Callable[[str], bool]
) -> Difference | None:
    want, got = reference.first.metrics, observed.metrics
    names = [name for name in want if keep(name)]
    if want.keys() != got.keys():
        raise ValueError(f"metrics on one side only: {sorted(want.keys() ^ got.keys())}.")
    pick = lambda values: {name: values[name] for name in names}
    return first_difference(pick(want), pick(got), relative=TOLERANCE, floor=1e-7)


def untrained(params: Any, gradients: Any) -> dict[str, Any]:
    """Returns by path the parameters that have no gradient: layers update them themselves."""
    trained = dict(tree.flatten_items(gradients))
    return {path: x for path, x in tree.flatten_items(params) if path not in trained}
