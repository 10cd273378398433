"""Checks on each mesh: numbers equal to those of one device, and a state that can be restored."""

import functools
from collections.abc import Callable

import jax
import numpy as np

from moelib.core import tree
from moelib.verify.compare import Difference, first_bit_difference, first_difference
from moelib.verify.outcome import CheckFailedError, CheckSkippedError
from moelib.verify.reference import (
    GRADIENT_TOLERANCE,
    ROUNDED_GRADIENT,
    ROUNDED_LOSS,
    SAVED_STEP,
    TOLERANCE,
    Reference,
    check_rounded_gradients,
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

    def _unless_rounded(
        self, found: Difference | None, bound: Callable[[], Difference | None]
    ) -> Difference | str | None:
        """Returns a difference, or a detail if it may be due to the rounding of a scheme.

        Sums over devices have another order, after which operands close to the middle of two values
        of 8 bits round to the other one, as with another kernel on one device. Such differences
        have to be within `bound`.
        """
        schemes = self._reference.plain.unquantized
        if found is None or not schemes:
            return found
        return bound() or f"within the rounding of {schemes}: {found}"

    def loss(self) -> Difference | str | None:
        """Compares the loss and the objective of the first step."""
        names = ("loss", "objective", "num_tokens")
        compare = functools.partial(
            _compare_metrics, self._reference, self._steps[0], lambda name: name in names
        )
        found = self._unless_rounded(compare(), lambda: compare(ROUNDED_LOSS))
        if not isinstance(found, Difference):
            return found
        first = self.metrics()
        if isinstance(first, Difference) and first.leaf != found.leaf:
            raise CheckFailedError(f"{found}. The first layer with another metric: {first}.")
        return found

    def gradients(self) -> Difference | str | None:
        """Compares the gradient of every parameter."""
        want, got = self._reference.first.gradients, jax.device_get(self._steps[0].gradients)
        apart = map(self._reference.plain.experts_apart, (want, got))
        # Of the last layer that is wrong: from there, errors spread to all before it.
        backward = (dict(reversed(each.items())) for each in apart)
        floor = rounding_floor(want, self._reference.batches[0])
        found = first_difference(*backward, relative=GRADIENT_TOLERANCE, floor=floor)
        known = self._reference
        bound = lambda: check_rounded_gradients(known, self._probe, known.start, "on the mesh")
        return self._unless_rounded(found, bound)

    def metrics(self) -> Difference | str | None:
        """Compares auxiliary losses, expert loads, and all other metrics of layers."""
        compare = functools.partial(
            _compare_metrics, self._reference, self._steps[0], lambda _: True
        )
        return self._unless_rounded(compare(), lambda: compare(ROUNDED_GRADIENT))

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

    def curve(self) -> Difference | str | None:
        """Compares the losses of a few steps, and what the last one returns with its update."""
        losses = [
            {f"loss of step {i}": step.metrics["loss"] for i, step in enumerate(steps)}
            for steps in (self._reference.steps, self._steps)
        ]
        found = self._unless_rounded(
            first_difference(*losses, relative=TOLERANCE),
            lambda: first_difference(*losses, relative=ROUNDED_LOSS),
        )
        if isinstance(found, Difference):
            return found
        before, step = self._steps[-2].state_by_given, self._steps[-1]
        again = self._probe(before, self._reference.batches[-1], step.gradients)
        learners = jax.device_get((again.learner, step.state.learner))
        return first_difference(*learners, relative=TOLERANCE) or found

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


MESH_CHECKS: dict[str, Callable[[MeshRun], Difference | str | None]] = {
    name: check for name, check in vars(MeshRun).items() if not name.startswith("_")
}


def _compare_metrics(
    reference: Reference,
    observed: Observed,
    keep: Callable[[str], bool],
    relative: float = TOLERANCE,
) -> Difference | None:
    arrays = (
        reference.plain.metrics({name: x for name, x in step.metrics.items() if keep(name)})
        for step in (reference.first, observed)
    )
    return first_difference(*arrays, relative=relative, floor=1e-7)
