"""Checks on each mesh: numbers equal to those of one device, and a state that can be restored."""

import functools
from collections.abc import Callable

import jax
import numpy as np

from moelib.core import tree
from moelib.parallel.sharding import num_parts
from moelib.verify.compare import Difference, first_bit_difference, first_difference
from moelib.verify.outcome import CheckFailedError, CheckSkippedError
from moelib.verify.reference import (
    GRADIENT_TOLERANCE,
    SAVED_STEP,
    TOLERANCE,
    Reference,
    rounding_floor,
    untrained_parameters,
)
from moelib.verify.step_probe import Observed, Probe


class MeshRun:
    """Steps on one mesh, taken when a check first needs them, and the checks, in order."""

    def __init__(self, reference: Reference, probe: Probe) -> None:
        """Runs nothing."""
        self._reference, self._probe = reference, probe

    @functools.cached_property
    def _steps(self) -> list[Observed]:
        """The steps of the reference, with its gradients, each from the state before it.

        Steps with gradients of their own would differ where Adam divides by gradients near zero.
        """
        known, steps = self._reference, []
        state = known.start
        for batch, step in zip(known.batches, known.steps, strict=True):
            steps.append(self._probe(state, batch, step.gradients))
            state = steps[-1].state_by_given
        return steps

    def _require_equal_rounding(self) -> None:
        """Raises CheckSkippedError if operands may round to other values of 8 bits than on one."""
        schemes = self._reference.plain.unquantized
        with self._probe.trainer.on_mesh():
            if schemes and num_parts("sequence") > 1:
                raise CheckSkippedError(
                    f"{schemes}: attention over devices sums in another order, after which some "
                    "operands round to the next value of 8 bits"
                )

    def loss(self) -> Difference | None:
        """Compares the loss and the objective of the first step."""
        names = ("loss", "objective", "num_tokens")
        found = _compare_metrics(self._reference, self._steps[0], lambda name: name in names)
        if found and (first := self._differing_metric()) and first.leaf != found.leaf:
            raise CheckFailedError(f"{found}. The first layer with another metric: {first}.")
        return found

    def _differing_metric(self) -> Difference | None:
        return _compare_metrics(self._reference, self._steps[0], lambda _: True)

    def gradients(self) -> Difference | None:
        """Compares the gradient of every parameter."""
        self._require_equal_rounding()
        want, got = self._reference.first.gradients, jax.device_get(self._steps[0].gradients)
        apart = map(self._reference.plain.experts_apart, (want, got))
        # Of the last layer that is wrong: from there, errors spread to all before it.
        backward = (dict(reversed(each.items())) for each in apart)
        floor = rounding_floor(want, self._reference.batches[0])
        return first_difference(*backward, relative=GRADIENT_TOLERANCE, floor=floor)

    def metrics(self) -> Difference | None:
        """Compares auxiliary losses, expert loads, and all other metrics of layers."""
        self._require_equal_rounding()
        return self._differing_metric()

    def update(self) -> Difference | None:
        """Compares the learner's update by the same gradients, and the updates that layers make."""
        known = self._reference
        ours = jax.device_get(self._steps[0])
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
        """Compares the losses of a few steps, and what the last one returns with its update."""
        losses = (
            {f"loss of step {i}": step.metrics["loss"] for i, step in enumerate(steps)}
            for steps in (self._reference.steps, self._steps)
        )
        if found := first_difference(*losses, relative=TOLERANCE):
            return found
        before, step = self._steps[-2].state_by_given, self._steps[-1]
        again = self._probe(before, self._reference.batches[-1], step.gradients)
        learners = jax.device_get((again.learner, step.state.learner))
        return first_difference(*learners, relative=TOLERANCE)

    def replicas(self) -> Difference | None:
        """Compares, bit for bit, devices that hold the same part of an array."""
        for path, array in tree.flatten_items(self._steps[-1].state_by_given):
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
        state = self._steps[-2].state_by_given
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
        after = probe(state, known.batches[-1], known.steps[-1].gradients)
        pair = (jax.device_get(step.state_by_given) for step in (self._steps[-1], after))
        return first_bit_difference(*pair)

    def _require_checkpointer(self) -> None:
        if self._probe.trainer.config.checkpointer is None:
            raise CheckSkippedError("no checkpointer")


MESH_CHECKS: dict[str, Callable[[MeshRun], Difference | None]] = {
    name: check for name, check in vars(MeshRun).items() if not name.startswith("_")
}


def _compare_metrics(
    reference: Reference, observed: Observed, keep: Callable[[str], bool]
) -> Difference | None:
    arrays = (
        reference.plain.metrics({name: x for name, x in step.metrics.items() if keep(name)})
        for step in (reference.first, observed)
    )
    return first_difference(*arrays, relative=TOLERANCE, floor=1e-7)
