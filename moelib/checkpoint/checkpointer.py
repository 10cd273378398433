"""Checkpoints on Orbax: written in the background, whole or not at all, read under any mesh.

A checkpoint is a folder `step_00001000` with the arrays and a record (moelib.checkpoint.contents).
While it is written the folder has another name, so that one with this name is complete.
"""

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Mapping
from typing import Any, Literal

import jax

from moelib.checkpoint import contents
from moelib.checkpoint.contents import CheckpointRecord, DamagedCheckpointError
from moelib.checkpoint.policy import every_n_steps_and_last_policy, steps_to_keep
from moelib.checkpoint.restore import (
    Restored,
    agreed_checkpoints,
    first_line,
    not_found,
    restore_checkpoint,
)
from moelib.core import tree
from moelib.core.config import (
    REQUIRED,
    InstantiableConfig,
    Required,
    config_class,
    config_for_function,
)
from moelib.core.module import Module, nowrap

logger = logging.getLogger(__name__)

_UNFINISHED = ".orbax-checkpoint-tmp"  # In the name of a folder that is not complete.
_REMOVE_TRIES = 20


class CheckpointSaveError(RuntimeError):
    """A checkpoint that had to be written could not be."""


class Checkpointer(Module):
    """Writes checkpoints when its policy says so, keeps some of them, and reads them."""

    @config_class
    class Config(Module.Config):
        dir: Required[str] = REQUIRED  # A trainer sets <its dir>/checkpoints.
        # Builds a moelib.checkpoint.policy.Policy; its max_step, if None, is the trainer's.
        save_policy: InstantiableConfig = config_for_function(every_n_steps_and_last_policy).set(
            n=1000
        )
        keep_last_n: int | None = 3  # None keeps all.
        keep_every_n_steps: int | None = None  # Multiples of it are kept for ever.
        keep_best_n: int = 0  # How many are kept for the best `best_metric`.
        best_metric: str | None = None  # "<evaler>/<metric>", for example "validation/loss".
        best_mode: Literal["min", "max"] = "min"
        wait: Literal["no", "after_save"] = "no"  # Whether a step waits until it is written.

    def __init__(self, cfg: Any, *, parent: Module | None) -> None:
        """Checks the settings; touches no file.

        Raises:
            ValueError: If the best are to be kept and no metric is named.
        """
        super().__init__(cfg, parent=parent)
        cfg = self.config
        if cfg.keep_best_n and cfg.best_metric is None:
            raise ValueError(
                f"{self.path() or self.name}.keep_best_n is {cfg.keep_best_n}; set best_metric to "
                "'<evaler>/<metric>' too."
            )
        self._policy = cfg.save_policy.instantiate()
        self._dir = os.path.abspath(cfg.dir)
        self._orbax: Any = None
        self._pending: int | None = None
        self._damaged: set[int] = set()
        self.last_error: BaseException | None = None  # Of the newest save, if it failed.

    @property
    def dir(self) -> str:
        """The folder that holds the checkpoints."""
        return self._dir

    @nowrap
    def should_save(self, *, step: int, summaries: Mapping[str, float] | None = None) -> bool:
        """Returns whether the policy wants a checkpoint after this step."""
        return self._policy(step=step, summaries=summaries or {})

    @nowrap
    def latest_step(self) -> int | None:
        """Returns the step of the newest complete checkpoint that is not known to be damaged."""
        steps = [s for s in contents.list_checkpoints(self._dir) if s not in self._damaged]
        return max(steps, default=None)

    # Writing.

    @nowrap
    def save(self, state: Any, record: CheckpointRecord) -> None:
        """Begins to write a checkpoint of `record.step`; waits for the one before to be done.

        The arrays may be donated as soon as this returns. A failure, now or later, is logged as an
        error and kept in `last_error`; older checkpoints stay, and the next save tries anew.

        Args:
            state: Tree of arrays.
            record: What to write beside them; `arrays` and `versions` are filled in.
        """
        self.wait()
        step = record.step
        values = record.to_json() | {
            "arrays": contents.describe_arrays(state),
            "versions": contents.library_versions(),
        }
        try:
            import orbax.checkpoint as ocp

            os.makedirs(self._dir, exist_ok=True)
            args = ocp.args.Composite(
                **{
                    contents.STATE_ITEM: ocp.args.PyTreeSave(tree.to_nested(state)),
                    contents.RECORD_ITEM: ocp.args.JsonSave(values),
                }
            )
            self._checkpointer().save(contents.step_path(self._dir, step), args=args, force=True)
        except Exception as error:
            self._report_failure(step, error)
            return
        self._pending, self.last_error = step, None
        self._damaged.discard(step)
        if self.config.wait == "after_save":
            self.wait()

    @nowrap
    def wait(self) -> None:
        """Waits until the checkpoint being written is complete, then drops those not to be kept."""
        if self._pending is None:
            return
        step, self._pending = self._pending, None
        try:
            self._checkpointer().wait_until_finished()
        except Exception as error:
            self._report_failure(step, error)
            return
        self._drop_old()

    @nowrap
    def close(self) -> None:
        """Waits, and ends the background threads. The checkpointer can be used again."""
        self.wait()
        if self._orbax is not None:
            self._orbax.close()
            self._orbax = None

    def _checkpointer(self) -> Any:
        if self._orbax is None:
            import orbax.checkpoint as ocp

            handlers: dict[str, Any] = {
                contents.STATE_ITEM: ocp.PyTreeCheckpointHandler(),
                contents.RECORD_ITEM: ocp.JsonCheckpointHandler(),
            }
            self._orbax = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(**handlers))
        return self._orbax

    def _report_failure(self, step: int, error: BaseException) -> None:
        """Says loudly that a checkpoint was not written, and takes away what there is of it."""
        self.last_error = error
        older = self.latest_step()
        has = "There is no older one." if older is None else f"Step {older} is the newest there is."
        logger.error(
            "NO CHECKPOINT of step %d: it could not be written to %s: %s. Training goes on. %s "
            "Free some space, or see that the folder can be written.",
            step,
            self._dir,
            first_line(error),
            has,
        )
        if self._orbax is not None:  # It would raise the same error again.
            with contextlib.suppress(Exception):
                self._orbax.close()
            self._orbax = None
        # The storage's own threads may write on for a moment, into a folder that goes.
        for _ in range(_REMOVE_TRIES if jax.process_index() == 0 else 0):
            if not (left := _unfinished(self._dir)):
                break
            for path in left:
                shutil.rmtree(path, ignore_errors=True)
            time.sleep(0.1)

    def _drop_old(self) -> None:
        """Deletes the checkpoints that are not to be kept."""
        if jax.process_index() != 0 or self.config.keep_last_n is None:
            return
        cfg = self.config
        found = contents.list_checkpoints(self._dir)
        metrics: dict[int, float | None] = {}
        for step, path in found.items():
            if step in self._damaged:
                continue
            try:
                metrics[step] = CheckpointRecord.read(path).metrics.get(cfg.best_metric or "")
            except DamagedCheckpointError:
                self._damaged.add(step)
            except OSError as error:
                logger.warning("No old checkpoint is dropped: %s.", error)
                return
        kept = steps_to_keep(
            metrics,
            keep_last_n=cfg.keep_last_n,
            keep_every_n_steps=cfg.keep_every_n_steps,
            keep_best_n=cfg.keep_best_n,
            best_mode=cfg.best_mode,
        )
        for step in metrics.keys() - kept:
            shutil.rmtree(found[step], ignore_errors=True)

    # Reading.

    @nowrap
    def restore(self, target: Any, *, step: int | None = None) -> Restored | None:
        """Returns the newest checkpoint that can be read, or None if there is none.

        One that is damaged is left out with a warning that names the damage.

        Args:
            target: Tree of `jax.ShapeDtypeStruct` with shardings, of any mesh.
            step: A step to read, and no other.

        Raises:
            CheckpointMismatchError: If the arrays are not those of the target.
            CheckpointNotFoundError: If there is none of the step.
            DamagedCheckpointError: If every checkpoint is damaged, or that of the step.
            Exception: As it came, what kept a checkpoint from being read that may be sound: no
                permission, a disk that fails, too little memory.
        """
        found = agreed_checkpoints(self._dir)
        if step is not None:
            if step not in found:
                raise not_found(self._dir, step, found)
            return restore_checkpoint(found[step], target)
        damages = []
        for candidate in reversed(found):
            try:
                return restore_checkpoint(found[candidate], target)
            except DamagedCheckpointError as error:
                self._damaged.add(candidate)
                damages.append(str(error))
                logger.warning("Damaged checkpoint, trying the one before: %s", error)
        if damages:
            raise DamagedCheckpointError(
                "every checkpoint is damaged:\n  " + "\n  ".join(damages) + "\nMove "
                f"{self._dir} aside to start from step 0."
            )
        return None

    @nowrap
    def remove_unfinished(self) -> None:
        """Removes what processes that were killed while writing have left."""
        for path in _unfinished(self._dir) if jax.process_index() == 0 else ():
            logger.warning("Removed a checkpoint that was never finished: %s", path)
            shutil.rmtree(path, ignore_errors=True)


def _unfinished(directory: str) -> list[str]:
    names = os.listdir(directory) if os.path.isdir(directory) else []
    return [os.path.join(directory, name) for name in names if _UNFINISHED in name]
