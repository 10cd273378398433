"""Checkpoints: written in the background, complete or not at all, read under any mesh.

A checkpoint is a folder `step_00001000` with the arrays (moelib.checkpoint.writers) and a record
(moelib.checkpoint.contents). It is complete when it has the record.
"""

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import jax

from moelib.checkpoint import checksums, contents
from moelib.checkpoint.contents import (
    RECORD_FILE,
    STARTED_FILE,
    CheckpointRecord,
    DamagedCheckpointError,
    RunRecord,
    UnreadableCheckpointError,
    delete_checkpoint,
    list_checkpoints,
    list_lost,
    list_unfinished,
    move_checkpoint,
)
from moelib.checkpoint.local import LocalCheckpoints
from moelib.checkpoint.policy import every_n_steps_and_last_policy, steps_to_keep
from moelib.checkpoint.restore import (
    Restored,
    find_checkpoints,
    newest_readable,
    restore_checkpoint,
)
from moelib.checkpoint.writers import DiskWriter, ObjectStoreWriter, make_room, writer_for
from moelib.core import tree
from moelib.core.config import (
    REQUIRED,
    InstantiableConfig,
    Required,
    config_class,
    config_for_function,
)
from moelib.core.config_types import NonNegativeInt, PositiveInt
from moelib.core.errors import UserError, first_line
from moelib.core.module import Module
from moelib.runtime import storage
from moelib.runtime.processes import agreed, on_process_0
from moelib.runtime.storage import sync_folder

logger = logging.getLogger(__name__)

_REMOVE_TRIES = 20
_LONG_WAIT_SECONDS = 1.0
_LOCAL_EVERY_N_STEPS = 20


class CheckpointSaveError(UserError, RuntimeError):
    """A checkpoint that had to be written could not be."""


class _Pending(NamedTuple):
    """A checkpoint that is being written."""

    step: int
    written: Future[None]


class Checkpointer(Module):
    """Writes checkpoints when its policy asks for them, keeps some of them, and reads them."""

    @config_class
    class Config(Module.Config):
        dir: Required[str] = REQUIRED  # A trainer sets <its dir>/checkpoints.
        # Builds a moelib.checkpoint.policy.Policy; its max_step, if None, is the trainer's.
        save_policy: InstantiableConfig = config_for_function(every_n_steps_and_last_policy).set(
            n=1000
        )
        # Number of the newest that are kept; None keeps all.
        keep_last_n: NonNegativeInt | None = 3
        keep_every_n_steps: NonNegativeInt | None = None  # Multiples of it are kept permanently.
        keep_best_n: NonNegativeInt = 0  # Number that are kept for the best `best_metric`.
        best_metric: str | None = None  # "<evaler>/<metric>", for example "validation/loss".
        best_mode: Literal["min", "max"] = "min"  # Whether the least or the largest is the best.
        # Folder on each host for local checkpoints, such as /dev/shm/moelib; None writes none.
        local_dir: str | None = None
        # Steps between local checkpoints; None for 20.
        local_every_n_steps: PositiveInt | None = None
        wait: Literal["no", "after_save"] = "no"  # Whether a step waits until it is written.
        skip_checksums: bool = False  # If True, arrays are restored without a comparison.

    def __init__(self, cfg: Any, *, parent: Module | None) -> None:
        """Checks the settings; accesses no file.

        Raises:
            UserError: If keep_best_n is set and best_metric is not.
        """
        super().__init__(cfg, parent=parent)
        cfg = self.config
        if cfg.keep_best_n and cfg.best_metric is None:
            raise UserError(
                f"{self._title()}.keep_best_n={cfg.keep_best_n}: set best_metric to "
                "'<evaler>/<metric>' too."
            )
        every, name = cfg.local_every_n_steps, self._title()
        if every is not None and cfg.local_dir is None:
            raise UserError(
                f"{name}.local_every_n_steps={every}; set local_dir, the folder on each host, too."
            )
        if cfg.local_dir:
            storage.require_local(f"{name}.local_dir", cfg.local_dir, "dir for an object store")
        self._policy = cfg.save_policy.instantiate()
        self.dir = storage.absolute(cfg.dir)
        self.local = LocalCheckpoints(cfg.local_dir, self.dir) if cfg.local_dir else None
        self._writer: DiskWriter | ObjectStoreWriter | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: _Pending | None = None
        self.damaged: set[int] = set()  # Steps of durable ones that are known to be damaged.
        self._complete_step = 0
        self.last_error: BaseException | None = None  # Of the newest save, if it failed.

    def should_save(self, *, step: int, summaries: Mapping[str, float] | None = None) -> bool:
        """Returns whether the policy asks for a checkpoint after this step."""
        return self._policy(step=step, summaries=summaries or {})

    def should_save_locally(self, *, step: int) -> bool:
        """Returns whether a local checkpoint is due after this step."""
        every = self.config.local_every_n_steps or _LOCAL_EVERY_N_STEPS
        return self.local is not None and step % every == 0

    def is_local(self, path: str) -> bool:
        """Returns whether a checkpoint is a local one."""
        return self.local is not None and self.local.holds(path)

    @property
    def complete_step(self) -> int:
        """Step of the newest complete checkpoint, also a local one, that process 0 knows of."""
        return max(self._complete_step, 0 if self.local is None else self.local.complete_step)

    def latest_step(self) -> int | None:
        """Returns the step of the newest complete checkpoint not known to be damaged."""
        return max(contents.list_checkpoints(self.dir).keys() - self.damaged, default=None)

    def best_step(self) -> int | None:
        """Returns the step of the checkpoint with the best `best_metric`; None if none has it."""
        return contents.best_step(self.dir, self.config.best_metric or "", self.config.best_mode)

    # Writing.

    def save(self, state: Any, run: RunRecord) -> None:
        """Starts to write a checkpoint of `run.step`, after the previous one is complete.

        The arrays may be donated when this returns. A failure, now or later, is logged and kept in
        `last_error`; older checkpoints are unaffected, and the next save tries again.
        """
        if self._pending is not None:
            begin, before = time.perf_counter(), self._pending.step
            self.wait()
            if (waited := time.perf_counter() - begin) > _LONG_WAIT_SECONDS:
                logger.warning(
                    "The checkpoint of step %d was still incomplete at step %d (%.0f s of wait): "
                    "a crash loses up to two intervals; save less often.",
                    before,
                    run.step,
                    waited,
                )
        path = contents.step_path(self.dir, run.step)
        try:
            agreed(lambda: make_room(path) if jax.process_index() == 0 else None)
            started = checksums.start_checksums(tree.by_path(state))
            agreed(lambda: self._start(path, state))
        except Exception as error:
            self._report_failure(run.step, error)
            return
        arrays = contents.describe_arrays(state)
        written = self._thread.submit(self._finish, path, run, arrays, started)
        self._pending = _Pending(run.step, written)
        self.last_error = None
        self.damaged.discard(run.step)
        if self.config.wait == "after_save":
            self.wait()

    def _start(self, path: str, state: Any) -> None:
        self._writer = self._writer or writer_for(path)
        self._writer.start(path, state)

    def _finish(
        self, path: str, run: RunRecord, arrays: contents.Arrays, started: Mapping[str, Any]
    ) -> None:
        """Waits until the arrays are written, and on process 0 writes the record."""
        assert self._writer is not None
        self._writer.wait()
        if jax.process_index() == 0:
            sync_folder(path, recursive=True)
            sync_folder(self.dir)  # The name of the new checkpoint.
            CheckpointRecord.of(run, arrays, checksums.finish_checksums(started)).write(path)
            self._complete_step = run.step
            with contextlib.suppress(OSError):  # It is complete.
                storage.remove(os.path.join(path, STARTED_FILE))

    def wait(self, *, alone: bool = False) -> None:
        """Waits until the checkpoint being written is complete, then deletes those not kept.

        All processes must call it, unless this one waits `alone`, as after an error of its own.
        """
        if self._pending is None:
            return
        (step, written), self._pending = self._pending, None
        try:
            written.result() if alone else agreed(written.result)
        except Exception as error:
            self._report_failure(step, error)
            return
        self._delete_old()
        if self.local is not None:
            self.local.delete_until(step)

    def save_locally(self, state: Any, run: RunRecord) -> None:
        """Starts to write a local checkpoint; see `LocalCheckpoints.save`."""
        assert self.local is not None
        self.local.save(state, run)

    def close(self) -> None:
        """Waits alone, and ends the background threads. The checkpointer remains usable."""
        self.wait(alone=True)
        if self.local is not None:
            self.local.wait()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _report_failure(self, step: int, error: BaseException) -> None:
        """Logs that a checkpoint was not written, and removes its incomplete files."""
        self.last_error = error
        try:
            older = self.latest_step()
            has = "There is no older one." if older is None else f"Step {older} is the newest."
        except UserError as unreachable:
            has = str(unreachable)
        logger.error(
            "NO CHECKPOINT of step %d: it could not be written to %s: %s. Training continues. %s "
            "Free some space, or make the folder writable.",
            step,
            self.dir,
            first_line(error),
            has,
        )
        if self._writer is not None:  # It would raise the same error again.
            with contextlib.suppress(Exception):
                self._writer.close()
            self._writer = None
        # The storage's own threads may write for another moment, into a folder being removed.
        for _ in range(_REMOVE_TRIES if jax.process_index() == 0 else 0):
            try:
                if not (left := list_unfinished(self.dir)):
                    break
            except UserError:
                break
            for path in left:
                with contextlib.suppress(OSError):
                    delete_checkpoint(path)
            time.sleep(0.1)

    def _delete_old(self) -> None:
        """Deletes the checkpoints that are not kept."""
        cfg = self.config
        if jax.process_index() != 0 or cfg.keep_last_n is None:
            return
        try:
            found = contents.list_checkpoints(self.dir)
        except UserError as error:
            logger.warning("No old checkpoint is deleted: %s", error)
            return
        metrics: dict[int, float | None] = {}
        for step in found.keys() - self.damaged:
            try:
                record = CheckpointRecord.read(found[step])
            except DamagedCheckpointError:
                self.damaged.add(step)
            except UnreadableCheckpointError as error:
                logger.warning("No old checkpoint is deleted: %s", error)
                return
            else:
                metrics[step] = record.metrics.get(cfg.best_metric or "")
        kept = steps_to_keep(
            metrics,
            keep_last_n=cfg.keep_last_n,
            keep_every_n_steps=cfg.keep_every_n_steps,
            keep_best_n=cfg.keep_best_n,
            best_mode=cfg.best_mode,
        )
        oldest, every = min(kept, default=0), cfg.keep_every_n_steps
        damaged = {x for x in self.damaged if x < oldest and not (every and x % every == 0)}
        for step in metrics.keys() - kept | found.keys() & damaged:
            _delete(found[step])

    # Reading.

    def restore(self, target: Any, *, step: int | None = None) -> Restored | None:
        """Returns the newest checkpoint that can be read, or that of `step`; None if there is none.

        A local one is read if it is newer than all durable ones and `step` is None. A damaged one
        is skipped with a warning that describes the damage. The target is a tree of
        `jax.ShapeDtypeStruct` with shardings, of any mesh.

        Raises:
            CheckpointMismatchError: If the arrays are not those of the target.
            CheckpointNotFoundError: If there is none of the step.
            DamagedCheckpointError: If every checkpoint, or that of the step, is damaged.
            UnreadableCheckpointError: If a checkpoint that may be sound could not be read: no
                permission, a failing disk, too little memory.
        """
        found = find_checkpoints(self.dir, step)
        skip, restored = self.config.skip_checksums, None
        if self.local is not None and step is None:
            restored = self.local.restore(target, after=max(found, default=0), skip_checksums=skip)
        if restored is None and found:
            restored = self._restore_durable(found, target, step)
        self._complete_step = 0 if restored is None else restored.record.step
        return restored

    def _restore_durable(self, found: dict[int, str], target: Any, step: int | None) -> Restored:
        if step is None:
            damaged = on_process_0(lambda: sorted(self.damaged))
            found = {each: path for each, path in found.items() if each not in damaged} or found
        try:
            skip = self.config.skip_checksums
            read = lambda path: restore_checkpoint(path, target, skip_checksums=skip)
            return newest_readable(found, read, on_damage=self.damaged.add)
        except DamagedCheckpointError as error:
            cure = f"\nMove {self.dir} aside to start from step 0." if step is None else ""
            raise DamagedCheckpointError(f"{error}{cure}") from None

    def remove_unfinished(self) -> None:
        """Removes incomplete checkpoints of processes that were killed.

        A checkpoint after the newest complete one whose record is lost is moved aside.

        Raises:
            DamagedCheckpointError: If there is no complete one, but one whose record is lost.
        """

        def remove() -> None:
            lost = list_lost(self.dir)
            if lost and not list_checkpoints(self.dir):
                raise DamagedCheckpointError(
                    f"{lost[-1]} has no {RECORD_FILE}, and is the only checkpoint; put the file "
                    f"back to resume from it, or move {self.dir} aside to start from step 0."
                )
            for path in list_unfinished(self.dir):
                if path in lost:
                    aside = f"{path}.without_record"
                    delete_checkpoint(aside)
                    move_checkpoint(path, aside)
                    logger.warning(
                        "A checkpoint has no record, and is moved to %s: put its record back and "
                        "rename it to resume from it, or remove it.",
                        aside,
                    )
                    continue
                logger.warning("An incomplete checkpoint is removed: %s", path)
                _delete(path)

        on_process_0(remove)


def _delete(path: str) -> None:
    """Deletes a checkpoint, or logs a warning."""
    try:
        delete_checkpoint(path)
    except OSError as error:
        logger.warning("%s cannot be deleted: %s.", path, error.strerror)
