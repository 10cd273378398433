"""The checks on one device, and those of checkpoints."""

import contextlib
import io
import os
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import jax

from moelib.checkpoint.policy import every_n_steps_policy
from moelib.core.config import config_for_function
from moelib.core.tree import Batch
from moelib.train.loop import TrainLoop
from moelib.train.metrics import PackedMetrics, pack
from moelib.train.signals import StopRequest
from moelib.train.start import Start
from moelib.verify.batch_checks import causality, doubled, masked, packing, padding
from moelib.verify.compare import Difference, first_bit_difference, first_difference
from moelib.verify.data_checks import data, hosts
from moelib.verify.export_checks import exported
from moelib.verify.objective_checks import auxiliary, derivatives, plain, reached
from moelib.verify.outcome import CheckSkippedError
from moelib.verify.reference import Reference
from moelib.verify.step_checks import stepped
from moelib.verify.variant_checks import quantized


def saved(known: Reference) -> Difference | None:
    """Compares, bit for bit, checkpoints of the first and of the last state with these states."""
    if known.config.checkpointer is None:
        raise CheckSkippedError("no checkpointer")
    last = known.steps[-1].state_by_given
    known.probe.save(last, int(last.step))
    for state in (known.start, last):
        got = jax.device_get(known.probe.restore(known.probe, int(state.step)))
        if found := first_bit_difference(state, got):
            return found
    return None


class _InterruptedRunError(Exception):
    """The end of a run between two checkpoints."""


def interrupted(known: Reference) -> Difference | None:
    """Compares an interrupted and resumed run of the trainer's loop with one that is not."""
    if known.config.checkpointer is None:
        raise CheckSkippedError("no checkpointer")
    whole: dict[int, Batch] = {}
    parts: dict[int, Batch] = {}
    with tempfile.TemporaryDirectory() as folder:
        state = _train(known, os.path.join(folder, "whole"), whole)
        with contextlib.suppress(_InterruptedRunError):
            _train(known, os.path.join(folder, "parts"), parts, end=6)
        resumed = _train(known, os.path.join(folder, "parts"), parts)
    assert whole, "The trainer's loop ran another step."
    named = [{f"batch {i}": batch for i, batch in sorted(x.items())} for x in (whole, parts)]
    for i, batch in enumerate(known.probe.trainer.input.iterator()):
        if i not in whole:
            break
        want = {f"batch {i}/{name}": batch[name] for name in whole[i]}
        got = {f"batch {i}/{name}": x for name, x in whole[i].items()}
        if found := first_difference(want, got, relative=0.0):
            return found
    return first_bit_difference(*named) or first_bit_difference(state, resumed)


def _train(known: Reference, folder: str, batches: dict[int, Batch], end: int = -1) -> Any:
    """Runs the trainer's loop with the reference's step; returns the state.

    Adds the batch of each step. There is a checkpoint after every fourth step.

    Raises:
        _InterruptedRunError: Before step `end`.
    """
    os.makedirs(folder, exist_ok=True)
    cfg = known.config.clone(dir=folder)
    policy = config_for_function(every_n_steps_policy).set(n=4)
    cfg.checkpointer.set(save_policy=policy, wait="after_save")
    cfg.summary_writer.set(formats=("json_lines",))
    trainer = cfg.instantiate(parent=None, devices=known.devices)
    if trainer.restore_checkpoint() is None:
        trainer._state = jax.device_put(known.start, trainer.trainer_state_shardings)

    def step(state: Any, batch: Batch) -> tuple[Any, PackedMetrics]:
        number = int(state.step)
        if number == end:
            raise _InterruptedRunError
        batches[number] = jax.device_get(batch)
        own = {name: batch[name] for name in known.batches[0]}
        observed = known.probe(state, own, known.first.gradients)
        return observed.state, pack(observed.metrics)

    trainer.compile_train_step = lambda batch: step
    silent = io.StringIO()
    with trainer.on_mesh(), redirect_stdout(silent), redirect_stderr(silent):
        start = Start(trainer.step, trainer.input_state, trainer.restored)
        TrainLoop(trainer, start, stop=StopRequest()).run()
    return jax.device_get(trainer.trainer_state)


# Those nearest to the cause of a failure first. Each returns the first difference, or None or a
# note; or raises CheckFailedError or CheckSkippedError.
SINGLE_DEVICE_CHECKS: dict[str, Callable[[Reference], Difference | str | None]] = {
    check.__name__: check
    for check in (
        data,
        hosts,
        plain,
        derivatives,
        quantized,
        stepped,
        saved,
        interrupted,
        reached,
        auxiliary,
        masked,
        padding,
        doubled,
        packing,
        causality,
        exported,
    )
}
