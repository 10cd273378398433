"""The reference: numbers of a config on one device, which every mesh has to reproduce."""

import dataclasses
import functools
import itertools
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from moelib.core import tree
from moelib.core.param import specs_by_path
from moelib.core.tree import Batch
from moelib.layers.adapter import is_adapter
from moelib.verify.batches import batches_of, num_sequences
from moelib.verify.outcome import CheckFailedError, CheckSkippedError
from moelib.verify.plain import Plain, Values
from moelib.verify.step_probe import Observed, Probe

SAVED_STEP = 2  # Step of the checkpoints that checks write on a mesh.
_NUM_STEPS = 3  # Length of the loss curve.
_MAX_DRAWS = 32  # Batches that are tried for a step, until none has a tie.
_NOISE = 0.05  # Standard deviation of the noise added to parameters that start constant.

# Relative error of float32 sums taken in another order, against the largest entry of the array.
# Observed on eight devices: 4e-7 for metrics, and 1.2e-5 for gradients, whose rounding errors are
# amplified by weights with a standard deviation of fan-in^-0.5.
TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 3e-5

# The same after rounding to fewer bits: of losses, and of the norm of a gradient's error.
# Observed in bfloat16: 4e-3 and 0.17.
ROUNDED_LOSS, ROUNDED_GRADIENT = 0.01, 0.3


@dataclasses.dataclass(frozen=True)
class Reference:
    """Numbers of one device, on the host."""

    probe: Probe  # The step on one device.
    start: Any  # State that all comparisons start from; no trained parameter is constant in it.
    batches: tuple[Batch, ...]  # One per step.
    steps: tuple[Observed, ...]  # Each from the state before it, given its own gradients.
    is_random: bool  # Whether the step depends on its random key.
    plain: Plain  # The model in its plain form, which also names single layers.
    tie: str = ""  # A tie of experts for a token that no other batch avoids.

    @property
    def config(self) -> Any:
        """The config of the trainer."""
        return self.probe.trainer.config

    @property
    def devices(self) -> list[Any]:
        """The device, in a list."""
        return list(self.probe.trainer.mesh().devices.flat)

    @property
    def first(self) -> Observed:
        """The step from `start`."""
        return self.steps[0]

    @functools.cached_property
    def expected(self) -> Values:
        """The results of the first step by the plain model."""
        start = self.start._replace(model=self.plain.layers_apart(self.start.model))
        return self.plain(start, self.batches[0])

    def check_plain(self) -> None:
        """Raises CheckSkippedError if a step does not compute the numbers of the plain form."""
        if schemes := self.plain.unquantized:
            raise CheckSkippedError(f"{schemes} rounds operands to 8 bits; the plain form does not")

    def check_tokens(self) -> None:
        """Raises CheckSkippedError if the model reads other batches than packed tokens."""
        if not self.probe.trainer.model.is_language_model:
            raise CheckSkippedError("the model is not a language model")

    def initial(self) -> Any:
        """Returns the state that a run starts from, with noise in constant parameters."""
        state = jax.device_get(self.probe.initial(self.config.prng_seed))
        return state._replace(model=_with_noise(state.model, self.probe))

    def moved(self, state: Any) -> list[Any]:
        """Returns the state with trained parameters moved by as much as bfloat16 rounds them."""
        trained = tree.by_path(self.first.gradients)

        def changed(seed: int, path: str, x: Any) -> Any:
            if path not in trained:
                return x
            rng = np.random.default_rng((seed, zlib.crc32(path.encode())))
            return (x * (1 + rng.uniform(-(2.0**-8), 2.0**-8, x.shape))).astype(x.dtype)

        moves = [functools.partial(changed, seed) for seed in range(2)]
        return [state._replace(model=tree.map_by_path(move, state.model)) for move in moves]

    def observe(self, batch: Batch) -> Observed:
        """Returns the result, on the host, of a step from `start` on one device."""
        return jax.device_get(self.probe(self.start, batch, self.first.gradients))


def make_reference(probe: Probe, initial: Any) -> Reference:
    """Compiles and runs the steps on one device, from an initial state on the host."""
    cfg = probe.trainer.config
    start = initial._replace(model=_with_noise(_scaled(initial.model, probe), probe))
    drawn = batches_of(probe.trainer)
    batch = next(drawn)
    gradients = tree.select(start.model, probe.trainer.learner.is_updated)
    probe.compile(start, batch, gradients)
    other_key = start._replace(prng_key=np.asarray(start.prng_key) ^ 1)
    metrics = [probe(state, batch, gradients).metrics for state in (start, other_key)]
    # Random numbers may reach an auxiliary loss or a metric only.
    is_random = not np.array_equal(*(list(x.values()) for x in metrics), equal_nan=True)
    # Parts without a plain form: a scan's own random numbers, and dispatch that drops.
    keep = ("stack",) * is_random + ("dispatcher",) * drops_tokens(metrics[0])
    plain = Plain(probe.trainer, keep)
    drawn = itertools.chain([batch], drawn)
    state, batches, steps, ties = start, [], [], []
    for _ in range(_NUM_STEPS):
        batch, tie = _without_ties(plain, state, drawn)
        gradients = jax.device_get(probe(state, batch, gradients).gradients)
        steps.append(jax.device_get(probe(state, batch, gradients)))
        state = steps[-1].state_by_given
        batches.append(batch)
        ties.append(tie)
    if cfg.checkpointer is not None:
        probe.save(start, int(start.step))
    found = next(filter(None, ties), "")
    return Reference(probe, start, tuple(batches), tuple(steps), is_random, plain, found)


def _without_ties(plain: Plain, state: Any, drawn: Iterator[Batch]) -> tuple[Batch, str]:
    """Returns the next batch without a tie of choices, or the least tie of a few and a text on it.

    After a tie, sums in another order send a token to another expert, or a query to another key, or
    open or close a ReLU, which changes a gradient.
    """
    state, ties = state._replace(model=plain.layers_apart(state.model)), []
    for batch in itertools.islice(drawn, _MAX_DRAWS):
        try:
            margins = plain(state, batch).margins
        except Exception:  # The check `plain` reports it.
            return batch, ""
        scope = min(margins, key=margins.__getitem__, default="")
        if not scope or margins[scope] > TOLERANCE:
            return batch, ""
        ties.append((margins[scope], scope, batch))
    margin, scope, batch = max(ties, key=lambda tie: tie[0])
    what = "the scores of two choices for a token, or the input of a ReLU and 0, differ by"
    return batch, f"{scope}: {what} {margin:.2g}"


def _with_noise(params: Any, probe: Probe) -> Any:
    """Returns the parameters with noise in trained ones that are constant, as those of norms."""

    def changed(path: str, x: Any) -> Any:
        if not probe.trainer.learner.is_updated(path) or x.size == 0 or np.ptp(x) > 0:
            return x
        rng = np.random.default_rng(zlib.crc32(path.encode()))
        return (x + _NOISE * rng.standard_normal(x.shape)).astype(x.dtype)

    return tree.map_by_path(changed, params)


def _scaled(params: Any, probe: Probe) -> Any:
    """Returns the parameters with matrices of standard deviation fan-in^-0.5, but for adapters.

    At this scale a mistake in any layer changes the loss. Adapters multiply by their own scale.
    """
    specs = specs_by_path(probe.trainer.trainer_state_specs.model)

    def changed(path: str, x: Any) -> Any:
        if is_adapter(path) or specs[path].fan_axes is None or np.std(x) == 0:
            return x
        return (x * (specs[path].fans()[0] ** -0.5 / np.std(x))).astype(x.dtype)

    return tree.map_by_path(changed, params)


def rounding_floor(gradients: Any, batch: Batch) -> float:
    """Returns the error allowed for gradients that are sums of larger terms, which may cancel.

    The mean of n random terms shrinks with sqrt(n), but not its rounding error.
    """
    largest = max(float(np.abs(x).max(initial=0.0)) for x in jax.tree.leaves(gradients))
    return 1e-7 * largest * max(1.0, num_sequences(batch) / 8) ** 0.5


def check_rounded_gradients(known: Reference, probe: Probe, state: Any, where: str) -> None:
    """Raises CheckFailedError if an error of a gradient is larger than by rounding to fewer bits.

    A sum that cancels has a larger error than its terms: as large as its change if the parameters
    move by as much as they are rounded. How large other gradients are does not matter.
    """
    given = known.batches[0], known.first.gradients

    def gradients(run: Probe, state: Any) -> dict[str, Any]:
        found = jax.device_get(run(state, *given).gradients)
        return {path: np.float32(x) for path, x in known.plain.by_layer(found).items()}

    want, got = gradients(known.probe, state), gradients(probe, state)
    moved = [gradients(probe, each) for each in known.moved(state)]
    smallest = 1e-6 * max(map(np.linalg.norm, want.values()))  # Of a sum that is exactly 0.
    for path, x in reversed(want.items()):  # Errors spread to all layers before.
        norm, error = np.linalg.norm(x), np.linalg.norm(got[path] - x)
        change = max(np.linalg.norm(each[path] - got[path]) for each in moved)
        allowed = max(ROUNDED_GRADIENT * norm + 2 * change, smallest)
        if not error <= allowed:
            raise CheckFailedError(
                f"The gradient of {path} {where} has an error of norm {error:.3g}, allowed "
                f"{allowed:.3g}, and on one device in float32 the norm {norm:.3g}."
            )


def untrained_parameters(params: Any, gradients: Any) -> dict[str, Any]:
    """Returns, by path, the parameters without a gradient, which layers update themselves."""
    trained = dict(tree.flatten_items(gradients))
    return {path: x for path, x in tree.flatten_items(params) if path not in trained}


def metric_name(path: str) -> str:
    """Returns the last part of a metric's path that is not a number."""
    return re.sub(r"(/\d+)+$", "", path).rpartition("/")[2]


def drops_tokens(metrics: Mapping[str, float]) -> bool:
    """Returns whether a layer dropped tokens."""
    return any(x for path, x in metrics.items() if metric_name(path) == "drop_rate")
