"""Training as one call: from a config to the outcome of its run."""

import dataclasses
import os
from typing import Any

import jax

from moelib.core.config import REQUIRED
from moelib.core.errors import UserError
from moelib.core.metrics import Scalars
from moelib.train.trainer import SpmdTrainer


@dataclasses.dataclass(frozen=True)
class FitResult:
    """Outcome of a training run."""

    step: int  # Steps taken in total, those before a restart included.
    # Metrics of the last step by name, `loss` in nats per token; empty if this call took no step.
    metrics: Scalars
    evaluations: dict[str, Scalars]  # Latest metrics of each evaler, by the name of the evaler.
    trainer_dir: str  # Folder of the run, with its config, checkpoints and metrics.
    # Reason for stopping before `max_step`: "SIGTERM", "SIGINT" or "end of input".
    stopped_by: str | None = None


def fit(
    trainer: SpmdTrainer.Config | SpmdTrainer,
    *,
    trainer_dir: str | os.PathLike[str] | None = None,
    max_step: int | None = None,
    prng_key: jax.Array | int | None = None,
) -> FitResult:
    """Trains up to `max_step`, resuming from the newest checkpoint in the run's folder.

    SIGTERM or SIGINT saves a checkpoint and ends the run early, without an error.

    Args:
        trainer: Config of a trainer, which is not changed, or a trainer that is built already.
        trainer_dir: Folder of the run; by default the config's `dir`.
        max_step: Step to stop at; by default the config's.
        prng_key: Key or seed of a run without a checkpoint; by default the config's `prng_seed`.

    Raises:
        UserError: If a setting is invalid, the run has no folder, or the folder belongs to a run
            with another config.
        NonFiniteError: At the first step whose loss or parameters are not finite.
        CheckpointSaveError: If the last checkpoint could not be written.
    """
    if not isinstance(trainer, SpmdTrainer | SpmdTrainer.Config):
        raise UserError(f"trainer is {trainer!r}; pass the config of a trainer.")
    directory = os.fspath(trainer_dir) if isinstance(trainer_dir, os.PathLike) else trainer_dir
    settings: dict[str, Any] = {"dir": directory, "max_step": max_step}
    settings = {name: value for name, value in settings.items() if value is not None}
    if not isinstance(trainer, SpmdTrainer):
        cfg = trainer.clone(**settings)
        if cfg.dir is REQUIRED or not cfg.dir:
            raise UserError("dir is not set; pass trainer_dir, or set the config's dir.")
        trainer = cfg.instantiate(parent=None)
    elif settings:
        raise UserError(
            f"trainer_dir={trainer_dir!r} and max_step={max_step} cannot change a trainer that is "
            "built already; pass its config instead."
        )
    outcome = trainer.run(prng_key)
    return FitResult(
        step=outcome["step"],
        metrics=outcome["aux"],
        evaluations=outcome["evaler_summaries"],
        trainer_dir=trainer.config.dir,
        stopped_by=outcome["stopped_by"],
    )
