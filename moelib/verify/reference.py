"""The reference: numbers of a config on one device, which every mesh has to reproduce."""

import dataclasses
import functools
import re
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from moelib.core import tree
from moelib.core.param import specs_by_path
from moelib.core.tree import Batch, Nested
from moelib.verify.batches import packed_batch, vocab_size
from moelib.verify.outcome import CheckFailedError, CheckSkippedError
from moelib.verify.plain import Plain, Values
from moelib.verify.step_probe import Observed, Probe

SAVED_STEP = 2  # Step of the checkpoints that checks write on a mesh.
_NUM_STEPS = 3  # Length of the loss curve.
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

    def observe(self, batch: Batch) -> Observed:
        """Returns the result, on the host, of a step from `start` on one device."""
        return jax.device_get(self.probe(self.start, batch, self.first.gradients))


def make_reference(probe: Probe, initial: Any) -> Reference:
    """Compiles and runs the steps on one device, from an initial state on the host."""
    cfg = probe.trainer.config
    start = initial._replace(model=_with_noise(initial.model, probe))
    batches = tuple(
        packed_batch(cfg.input.global_batch_size, cfg.input.seq_len, vocab_size(cfg), seed)
        for seed in range(_NUM_STEPS)
    )
    gradients = tree.select(start.model, probe.trainer.learner.is_updated)
    probe.compile(start, batches[0], gradients)
    steps, state = [], start
    for batch in batches:
        gradients = jax.device_get(probe(state, batch, gradients).gradients)
        steps.append(jax.device_get(probe(state, batch, gradients)))
        state = steps[-1].state_by_given
    if cfg.checkpointer is not None:
        probe.save(start, int(start.step))
    other_key = start._replace(prng_key=np.asarray(start.prng_key) ^ 1)
    metrics = probe(other_key, batches[0], gradients).metrics
    is_random = metrics["loss"] != steps[0].metrics["loss"]
    # Parts without a plain form: a scan's own random numbers, and dispatch that drops.
    keep = ("stack",) * is_random + ("dispatcher",) * drops_tokens(steps[0].metrics)
    return Reference(probe, start, batches, tuple(steps), is_random, Plain(probe.trainer, keep))


def _with_noise(params: Any, probe: Probe) -> Any:
    """Returns the trained parameters at a scale at which a mistake in any layer changes the loss.

    Matrices have the standard deviation fan-in^-0.5, and constant parameters have noise.
    """
    specs = specs_by_path(probe.trainer.trainer_state_specs.model)

    def changed(path: str, x: Any) -> Any:
        if not probe.trainer.learner.is_updated(path) or x.size == 0:
            return x
        if np.ptp(x) == 0:
            rng = np.random.default_rng(zlib.crc32(path.encode()))
            return (x + _NOISE * rng.standard_normal(x.shape)).astype(x.dtype)
        if specs[path].fan_axes is None:
            return x
        return (x * (specs[path].fans()[0] ** -0.5 / np.std(x))).astype(x.dtype)

    return tree.map_by_path(changed, params)


def rounding_floor(gradients: Any, batch: Batch) -> float:
    """Returns the error allowed for gradients that are sums of larger terms, which may cancel.

    The mean of n random terms shrinks with sqrt(n), but not its rounding error.
    """
    largest = max(float(np.abs(x).max(initial=0.0)) for x in jax.tree.leaves(gradients))
    return 1e-7 * largest * max(1.0, len(batch["input_ids"]) / 8) ** 0.5


def check_gradient_norms(plain: Plain, want: Nested, got: Nested, where: str) -> None:
    """Raises CheckFailedError if an error of a gradient is larger than by rounding to fewer bits.

    Args:
        plain: The model, for the order of layers.
        want: Gradients of the reference, on the host.
        got: Gradients that were rounded.
        where: How these were computed, for the message.
    """
    want, got = (tree.by_path(plain.layers_apart(each)) for each in (want, got))
    norms = {path: float(np.linalg.norm(x)) for path, x in want.items()}
    for path in reversed(plain.in_order(norms)):
        error = float(np.linalg.norm(np.float32(got[path]) - want[path]))
        allowed = ROUNDED_GRADIENT * norms[path] + 0.01 * max(norms.values())
        if not error <= allowed:
            raise CheckFailedError(
                f"The gradient of {path} {where} has an error of norm {error:.3g}, allowed "
                f"{allowed:.3g}, and on one device in float32 the norm {norms[path]:.3g}."
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
