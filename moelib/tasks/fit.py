"""Training as one call: from a config to the outcome of its run."""

import dataclasses
import numbers
import os
from typing import TYPE_CHECKING, Any

import jax

from moelib.core.config import REQUIRED
from moelib.core.errors import UserError
from moelib.core.metrics import Scalars
from moelib.runs.figure import figure_of_runs
from moelib.runs.phases import END_OF_PHASE, OtherPhase
from moelib.tasks.run import Examples, check_arguments, task_trainer_config
from moelib.tasks.task import Task
from moelib.train.trainer import SpmdTrainer

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class FitResult:
    """Outcome of a training run."""

    step: int  # Steps taken in total, those before a restart included.
    # Metrics of the last step by name, `loss` in nats per token; empty if this call took no step.
    metrics: Scalars
    evaluations: dict[str, Scalars]  # Latest metrics of each evaler, by the name of the evaler.
    trainer_dir: str  # Folder of the run, with its config, checkpoints and metrics.
    # Reason for stopping before `max_step`: "SIGTERM", "SIGINT", "end of input" or a watcher's.
    stopped_by: str | None = None
    params: Any = None  # Trained parameters of a task, in its own tree; None for other models.
    # Step of the checkpoint with the best `checkpointer.best_metric`; None without such a metric.
    best_step: int | None = None

    def __repr__(self) -> str:
        scores = {name: x["loss"] for name, x in self.evaluations.items() if "loss" in x}
        shown = {"loss": self.metrics.get("loss"), **{f"{k}/loss": v for k, v in scores.items()}}
        losses = "".join(f", {k}={v:.4f}" for k, v in shown.items() if v is not None)
        why = f", stopped_by={self.stopped_by!r}" if self.stopped_by else ""
        return f"FitResult(step={self.step}{losses}, trainer_dir={self.trainer_dir!r}{why})"

    def plot(self, *names: str) -> "Figure":
        """Returns a figure of metrics by step, which a notebook shows.

        Args:
            names: Metrics of metrics.jsonl; by default the losses of training and evaluations.

        Raises:
            UserError: If the run has no such metric.
        """
        evaluated = (f"{name}/loss" for name, x in self.evaluations.items() if "loss" in x)
        return figure_of_runs([self.trainer_dir], names or ["mean_loss", *evaluated])


def fit(
    trainer: SpmdTrainer.Config | SpmdTrainer | Task.Config,
    examples: Examples | None = None,
    *,
    trainer_dir: str | os.PathLike[str] | None = None,
    max_step: int | None = None,
    prng_key: jax.Array | int | None = None,
    **settings: Any,
) -> FitResult:
    """Trains up to `max_step`, resuming from the newest checkpoint in the run's folder.

    SIGTERM or SIGINT saves a checkpoint and ends the run early, without an error.

    Args:
        trainer: Config of a trainer, which is not changed; a trainer that is built already; or a
            task.
        examples: Examples of a task, or a function that returns them.
        trainer_dir: Folder of the run; by default the config's `dir`.
        max_step: Step to stop at; by default the config's.
        prng_key: Key or seed of a run without a checkpoint; by default the config's `prng_seed`.
        settings: Further arguments of `task_trainer_config`: `optimizer`, `batch_size`, ...

    Raises:
        UserError: If a setting is invalid, the run has no folder, or the folder belongs to a run
            with another config.
        NonFiniteError: At the first step whose loss or parameters are not finite.
        CheckpointSaveError: If the last checkpoint could not be written.
    """
    if not isinstance(trainer, SpmdTrainer | SpmdTrainer.Config | Task.Config):
        raise UserError(f"trainer is {trainer!r:.80}; pass the config of a trainer or of a task.")
    if isinstance(trainer, Task.Config):
        if examples is None:
            raise UserError("examples is None; pass the examples to train the task on.")
        settings |= {"max_step": max_step}
        check_arguments("moelib.fit", task_trainer_config, trainer, examples, **settings)
        trainer = task_trainer_config(trainer, examples, **settings)
    elif examples is not None or settings:
        names = [*(["examples"] if examples is not None else []), *settings]
        raise UserError(
            f"{', '.join(names)}: arguments for a task, not for a config; set fields of the "
            "config, such as input.global_batch_size."
        )
    if not isinstance(prng_key, jax.Array | numbers.Integral | None):
        raise UserError(f"prng_key={prng_key!r}: pass a key of jax.random, or an integer.")
    directory = os.fspath(trainer_dir) if isinstance(trainer_dir, os.PathLike) else trainer_dir
    given: dict[str, Any] = {"dir": directory, "max_step": max_step}
    given = {name: value for name, value in given.items() if value is not None}
    if not isinstance(trainer, SpmdTrainer):
        cfg = trainer.clone(**given)
        if cfg.phase is not None:
            raise UserError(f"phase={cfg.phase!r}: a run chooses its phase; leave it None.")
        if cfg.dir is REQUIRED or not cfg.dir:
            raise UserError("dir is not set; pass trainer_dir, or set the config's dir.")
        trainer = cfg.instantiate(parent=None)
    elif given:
        raise UserError(
            f"trainer_dir={trainer_dir!r} and max_step={max_step} cannot change a trainer that is "
            "built already; pass its config instead."
        )
    trainer, outcome = _run(trainer, prng_key)
    return FitResult(
        step=outcome["step"],
        metrics=outcome["aux"],
        evaluations=outcome["evaler_summaries"],
        trainer_dir=trainer.config.dir,
        stopped_by=outcome["stopped_by"],
        params=trainer.result(),
        best_step=trainer.best_step(),
    )


def _run(
    trainer: SpmdTrainer, prng_key: jax.Array | int | None
) -> tuple[SpmdTrainer, dict[str, Any]]:
    """Takes the steps of all phases; returns the trainer and the outcome of the last one."""
    evaluations: dict[str, Any] = {}  # The latest of all phases, by evaler.
    while True:
        try:
            outcome = trainer.run(prng_key)
        except OtherPhase as other:
            trainer = trainer.of_phase(other.name)
        else:
            evaluations |= outcome["evaler_summaries"]
            if outcome["stopped_by"] != END_OF_PHASE:
                return trainer, outcome | {"evaler_summaries": evaluations}
            trainer = trainer.next_phase()
