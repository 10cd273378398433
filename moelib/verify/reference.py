"""The reference: what a config computes on one device, which every mesh has to repeat."""

import dataclasses
import zlib
from typing import Any

import jax
import numpy as np

from moelib.core import tree
from moelib.core.tree import Batch
from moelib.verify.batches import packed_batch
from moelib.verify.step_probe import Observed, Probe

NUM_STEPS = 3  # Of the loss curve.
SAVED_STEP = 2  # What checkpoints are called.
_SPREAD = 0.05  # Of what is added to parameters that begin all equal.


@dataclasses.dataclass(frozen=True)
class Reference:
    """What one device computes, on the host.

    Attributes:
        probe: The step on one device.
        start: The state that is compared from: no parameter has only equal entries, so that all
            take part.
        batches: One for each step of the curve.
        first: What the first step from `start` computes; its update is by its own gradients.
        losses: Of each step of the curve.
    """

    probe: Probe
    start: Any
    batches: tuple[Batch, ...]
    first: Observed
    losses: tuple[float, ...]

    def observe(self, batch: Batch, prng_key: Any = None) -> Observed:
        """Returns what a step from `start` computes on one device, on the host.

        Args:
            batch: The step's.
            prng_key: uint32 key data in the place of the state's own.
        """
        start = self.start if prng_key is None else self.start._replace(prng_key=prng_key)
        return jax.device_get(self.probe(start, batch, self.first.gradients))


def make_reference(cfg: Any, probe: Probe, initial: Any) -> Reference:
    """Compiles and runs the steps on one device.

    Args:
        cfg: The trainer's config.
        probe: Of one device.
        initial: The state as a run begins, on the host.

    Raises:
        Exception: Whatever the config's own model raises.
    """
    start = initial._replace(model=_enlivened(initial.model, probe))
    vocab_size = dict(cfg.model.items()).get("vocab_size") or 64
    batches = tuple(
        packed_batch(cfg.input.global_batch_size, cfg.input.seq_len, vocab_size, seed)
        for seed in range(NUM_STEPS)
    )
    gradients = tree.select(start.model, probe.trainer.learner.is_updated)
    probe.compile(start, batches[0], gradients)
    gradients = jax.device_get(probe(start, batches[0], gradients).gradients)
    first = jax.device_get(probe(start, batches[0], gradients))
    if cfg.checkpointer is not None:
        probe.save(start, SAVED_STEP)
    return Reference(probe, start, batches, first, curve(probe, start, batches, gradients)[0])


def curve(
    probe: Probe, state: Any, batches: tuple[Batch, ...], gradients: Any
) -> tuple[tuple[float, ...], list[Any]]:
    """Returns the loss of each step, and the state after each."""
    losses, states = [], []
    for batch in batches:
        observed = probe(state, batch, gradients)
        state = observed.state
        losses.append(observed.metrics["loss"])
        states.append(state)
    return tuple(losses), states


def _enlivened(params: Any, probe: Probe) -> Any:
    """Returns parameters of which none has only equal entries; those not trained stay."""

    def enliven(path: str, x: Any) -> Any:
        if not probe.trainer.learner.is_updated(path) or x.size == 0 or np.ptp(x) > 0:
            return x
        rng = np.random.default_rng(zlib.crc32(path.encode()))
        return (x + _SPREAD * rng.standard_normal(x.shape)).astype(x.dtype)

    return tree.map_by_path(enliven, params)
