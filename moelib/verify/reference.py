"""The reference: numbers of a config on one device, which every mesh has to reproduce."""

import dataclasses
import zlib
from typing import Any

import jax
import numpy as np

from moelib.core import tree
from moelib.core.tree import Batch
from moelib.verify.batches import packed_batch, vocab_size
from moelib.verify.plain import Plain
from moelib.verify.step_probe import Observed, Probe

SAVED_STEP = 2  # Step of the checkpoints that checks write on a mesh.
_NUM_STEPS = 3  # Length of the loss curve.
_NOISE = 0.05  # Standard deviation of the noise added to parameters that start constant.


@dataclasses.dataclass(frozen=True)
class Reference:
    """Numbers of one device, on the host."""

    probe: Probe  # The step on one device.
    start: Any  # State that all comparisons start from; no trained parameter is constant in it.
    batches: tuple[Batch, ...]  # One per step of the curve.
    first: Observed  # Step from `start`; `updated` follows from the step's own gradients.
    losses: tuple[float, ...]  # Loss of each step of the curve.
    plain: Plain  # The model in its plain form, which also names single layers.

    def observe(self, batch: Batch, prng_key: Any = None) -> Observed:
        """Returns the result, on the host, of a step from `start` on one device.

        `prng_key`, uint32 key data, replaces that of the state.
        """
        start = self.start if prng_key is None else self.start._replace(prng_key=prng_key)
        return jax.device_get(self.probe(start, batch, self.first.gradients))


def make_reference(cfg: Any, probe: Probe, initial: Any) -> Reference:
    """Compiles and runs the steps on one device, from an initial state on the host."""
    start = initial._replace(model=_with_noise(initial.model, probe))
    batches = tuple(
        packed_batch(cfg.input.global_batch_size, cfg.input.seq_len, vocab_size(cfg), seed)
        for seed in range(_NUM_STEPS)
    )
    gradients = tree.select(start.model, probe.trainer.learner.is_updated)
    probe.compile(start, batches[0], gradients)
    gradients = jax.device_get(probe(start, batches[0], gradients).gradients)
    first = jax.device_get(probe(start, batches[0], gradients))
    if cfg.checkpointer is not None:
        probe.save(start, int(start.step))
    losses, _ = curve(probe, start, batches, gradients)
    return Reference(probe, start, batches, first, losses, Plain(probe.trainer))


def curve(
    probe: Probe, state: Any, batches: tuple[Batch, ...], gradients: Any
) -> tuple[tuple[float, ...], list[Any]]:
    """Returns the loss of each step, and the state after each step."""
    losses, states = [], []
    for batch in batches:
        observed = probe(state, batch, gradients)
        state = observed.state
        losses.append(observed.metrics["loss"])
        states.append(state)
    return tuple(losses), states


def _with_noise(params: Any, probe: Probe) -> Any:
    """Returns the parameters with noise added to the trained ones that are constant."""

    def add(path: str, x: Any) -> Any:
        if not probe.trainer.learner.is_updated(path) or x.size == 0 or np.ptp(x) > 0:
            return x
        rng = np.random.default_rng(zlib.crc32(path.encode()))
        return (x + _NOISE * rng.standard_normal(x.shape)).astype(x.dtype)

    return tree.map_by_path(add, params)
