"""Local checkpoints: each process writes its own shards to a disk or memory of its host.

They cost no network and are written often. Processes that start again on the same hosts resume from
them, also on another mesh or in another number, if the shards on each host suffice. Those of a host
that is lost are gone: the run then resumes from the newest durable checkpoint.

    <local dir>/<run>/process_0003/step_00000020/
        shards.bin   bytes of the shards
        shards.json  the step of the newest durable checkpoint then, "after", and "shards":
                     {path of an array: [[first indices, sizes, offset] of each shard]}
        record/      as in a durable checkpoint, and written last as well
"""

import contextlib
import dataclasses
import glob
import hashlib
import json
import logging
import math
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from moelib.checkpoint import checksums, contents
from moelib.checkpoint.contents import (
    CheckpointMismatchError,
    CheckpointRecord,
    DamagedCheckpointError,
    RunRecord,
    delete_checkpoint,
    list_checkpoints,
    list_unfinished,
    step_path,
)
from moelib.checkpoint.restore import Restored, check_restored, on_all_processes
from moelib.core import tree
from moelib.core.errors import UserError, first_line
from moelib.runtime import storage
from moelib.runtime.processes import OtherProcessError, gather_json, on_process_0
from moelib.runtime.storage import read_json, write_json

logger = logging.getLogger(__name__)

_ID_FILE = "local.json"  # In the folder of durable checkpoints: the id of the run's local ones.
_BYTES, _INDEX = "shards.bin", "shards.json"
# Another process is at most one save behind: the newest step that all have is among the last two.
_NUM_KEPT = 2
_FAILURES = (OSError, UserError, OtherProcessError)  # No reason to stop: durable ones suffice.


class _Shard(NamedTuple):
    """A part of an array."""

    start: tuple[int, ...]  # First index of each dimension.
    data: np.ndarray


class LocalCheckpoints:
    """The local checkpoints of a run, as one process writes and reads them."""

    def __init__(self, local_dir: str, durable_dir: str) -> None:
        """Accesses no file.

        Args:
            local_dir: Folder on each host, which other runs may share.
            durable_dir: Folder of the run's durable checkpoints.
        """
        self._dir, self._durable_dir = os.path.abspath(local_dir), durable_dir
        self._run_dir: str | None = None
        self._thread = ThreadPoolExecutor(1, "local_checkpoint")
        self._writing: Future[None] | None = None
        self.complete_step = 0  # Step of the newest complete one of this process.

    # Writing.

    def save(self, state: Any, run: RunRecord) -> None:
        """Starts to write the state of `run.step`, after the previous one is complete.

        All processes must call it. The arrays are copied to the host first, and may be donated when
        this returns. A failure is logged, and training continues.
        """
        self.wait()
        try:
            own = self._own_dir(create=True)
        except _FAILURES as error:
            logger.error("NO LOCAL CHECKPOINT of step %d: %s.", run.step, first_line(error))
            return
        arrays = tree.by_path(state)
        started = checksums.start_checksums(arrays)
        for x in arrays.values():
            x.copy_to_host_async()
        shards = {path: _shards_of(x) for path, x in arrays.items()}
        saved = contents.describe_arrays(state)
        self._writing = self._thread.submit(self._write, own, shards, run, saved, started)

    def _write(
        self,
        own: str,
        shards: dict[str, list[_Shard]],
        run: RunRecord,
        arrays: contents.Arrays,
        started: Mapping[str, Any],
    ) -> None:
        path = step_path(own, run.step)
        try:
            self._delete_old(own)
            delete_checkpoint(path)
            _write_shards(path, shards, self._durable())
            CheckpointRecord.of(run, arrays, checksums.finish_checksums(started)).write(path)
            self.complete_step = run.step
        except Exception as error:
            _remove(path)
            logger.error(
                "NO LOCAL CHECKPOINT of step %d in %s: %s. Training continues; free some space "
                "or set checkpointer.local_dir to another folder.",
                *(run.step, own, first_line(error)),
            )

    def _delete_old(self, own: str) -> None:
        """Deletes old checkpoints, incomplete ones, and those of processes that are no more."""
        old = [path for _, path in sorted(list_checkpoints(own).items())[:-_NUM_KEPT]]
        for path in (*old, *list_unfinished(own)):
            _remove(path)
        self._delete_of_other_processes()

    def _delete_of_other_processes(self) -> None:
        """Deletes the folders of processes that an earlier start of the run had."""
        for folder in self._folders():
            if int(folder[-4:]) >= jax.process_count():
                _remove(folder)

    def _durable(self) -> int:
        """Returns the step of the newest durable checkpoint, as process 0 sees it; 0 if unknown."""
        with contextlib.suppress(OSError, UserError):
            if jax.process_index() == 0:
                return max(list_checkpoints(self._durable_dir), default=0)
        return 0

    def wait(self) -> None:
        """Waits until the checkpoint being written is complete."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def delete_until(self, step: int) -> None:
        """Deletes this process's checkpoints of `step` and before."""
        self.wait()
        if self._run_dir is None:
            return
        own = self._own_dir()
        with _failure_logged("Local checkpoints of step %d and before stay", step):
            self._delete_of_other_processes()
            for each, path in list_checkpoints(own).items():
                if each <= step:
                    _remove(path)
        for folder in (own, os.path.dirname(own)):
            with contextlib.suppress(OSError):  # Not empty.
                os.rmdir(folder)

    def delete_after(self, step: int) -> None:
        """Deletes the checkpoints on this host after `step`, from which the run continues.

        All processes must call it.
        """
        self.wait()
        self.complete_step = min(self.complete_step, step)
        with _failure_logged("Local checkpoints after step %d stay", step):
            for folder in self._folders():
                for each, path in list_checkpoints(folder).items():
                    if each > step:
                        _remove(path)

    def holds(self, path: str) -> bool:
        """Returns whether a checkpoint is a local one."""
        return path.startswith(os.path.join(self._dir, ""))

    # Reading.

    def restore(self, target: Any, *, after: int, skip_checksums: bool = False) -> Restored | None:
        """Returns the newest checkpoint after the step `after` that all processes can read.

        `after` is the step of the newest durable one; if a local one followed a later one, which
        the user has moved away, none is used. Each that cannot be used is skipped with a warning;
        None if there is none. All processes must call it.
        """
        steps = set()
        with _failure_logged("Local checkpoints after step %d are not used", after):
            found = [item for each in self._folders() for item in list_checkpoints(each).items()]
            steps = {step for step, _ in found if step > after}
            if steps and (gone := max(_followed(path) for _, path in found)) > after:
                logger.warning(
                    "Local checkpoints of steps %s are not used: step %d, which the newest "
                    "followed, is gone.",
                    *(sorted(steps), gone),
                )
                steps = set()
        common = set.intersection(*map(set, gather_json(sorted(steps))))
        for step in sorted(common, reverse=True):
            try:
                restored = self._restore(step, target, skip_checksums=skip_checksums)
            except UserError as error:
                logger.warning("The local checkpoint of step %d is not used: %s", step, error)
            else:
                self.complete_step = step
                return restored
        return None

    def _restore(self, step: int, target: Any, *, skip_checksums: bool) -> Restored:
        path = step_path(self._own_dir(), step)

        def read() -> tuple[CheckpointRecord, dict[str, jax.Array]]:
            try:
                record, paths = self._records(step)
                contents.check_arrays(record.arrays, contents.describe_arrays(target), path)
                shards = _read_shards(paths, record.arrays)
                arrays = {
                    name: _assembled(name, struct, shards.get(name, ()))
                    for name, struct in tree.by_path(target).items()
                }
            except UserError:
                raise
            except Exception as error:  # Any: a durable one is read instead.
                raise DamagedCheckpointError(f"{path}: {first_line(error)}") from error
            return record, arrays

        record, arrays = on_all_processes(read, path)
        if len(set(gather_json(_digest(record)))) > 1:
            raise DamagedCheckpointError(f"{path}: hosts have saved different records.")
        nested = tree.unflatten(arrays)
        check_restored(path, nested, record, skip_checksums=skip_checksums)
        return Restored(tree.from_nested(nested, target), record, path)

    def _records(self, step: int) -> tuple[CheckpointRecord, list[str]]:
        """Returns the record of a step, and the folders on this host that have it."""
        found = {}
        for folder in self._folders():
            with contextlib.suppress(DamagedCheckpointError):  # Such as one that is not there.
                path = step_path(folder, step)
                found[path] = CheckpointRecord.read(path)
        if not found:
            raise DamagedCheckpointError(f"step {step}: no process of this host has a record.")
        record = next(iter(found.values()))
        return record, [path for path, each in found.items() if _digest(each) == _digest(record)]

    # Folders.

    def _run_folder(self, *, create: bool) -> str:
        """Returns the folder of this run on this host; all processes must call it the first time.

        A run that begins again in an emptied folder gets another id: it must not resume from what
        its predecessor has left.
        """
        if self._run_dir is None:
            own_id = on_process_0(lambda: self._id(create))
            durable = self._durable_dir
            durable = durable if storage.is_remote(durable) else os.path.realpath(durable)
            name = hashlib.sha256(durable.encode()).hexdigest()[:16]
            folder = os.path.join(self._dir, f"{name}-{own_id}")
            if not own_id:
                return folder  # There is none.
            self._run_dir = folder
            for other in glob.glob(os.path.join(glob.escape(self._dir), f"{name}-*")):
                if other != folder:  # Of a run whose folder was deleted.
                    _remove(other)
        return self._run_dir

    def _id(self, create: bool) -> str:
        """Returns the id of the run's local checkpoints, "" if there is none."""
        path = os.path.join(self._durable_dir, _ID_FILE)
        own_id = str(read_json(path).get("id", ""))
        if create and not own_id:
            own_id = secrets.token_hex(8)
            storage.make_folder(self._durable_dir)
            write_json(path, {"id": own_id})
        return own_id

    def _own_dir(self, *, create: bool = False) -> str:
        return os.path.join(self._run_folder(create=create), f"process_{jax.process_index():04d}")

    def _folders(self) -> list[str]:
        """Returns the folders of processes on this host, this one's first."""
        own = self._own_dir()
        others = glob.glob(os.path.join(glob.escape(os.path.dirname(own)), "process_????"))
        return [own, *sorted(set(others) - {own})]


@contextlib.contextmanager
def _failure_logged(text: str, step: int) -> Iterator[None]:
    """Logs a failure of a disk in the block."""
    try:
        yield
    except _FAILURES as error:
        logger.error(f"{text}: %s. Training continues.", step, first_line(error))


def _followed(path: str) -> int:
    """Returns the step of the durable checkpoint that a local one followed, 0 if unknown."""
    try:
        return read_json(os.path.join(path, _INDEX)).get("after", 0)
    except UserError:
        return 0  # Reading it describes the damage.


def _digest(record: CheckpointRecord) -> str:
    """Returns a digest of a record, without what may differ between processes: paths, threads."""
    record = dataclasses.replace(record, config="", evaluated={}, files={})
    return hashlib.sha256(repr(record).encode()).hexdigest()


def _shards_of(x: jax.Array) -> list[_Shard]:
    """Returns the distinct shards of an array in this process, as copies on the host."""
    found = {}
    for shard in x.addressable_shards:
        start = tuple(
            each.indices(size)[0] for each, size in zip(shard.index, x.shape, strict=True)
        )
        if start not in found:
            found[start] = np.array(shard.data, order="C", copy=True)
    return [_Shard(start, data) for start, data in found.items()]


def _write_shards(path: str, shards: dict[str, list[_Shard]], after: int) -> None:
    """Writes the bytes and the index of shards."""
    os.makedirs(path)
    index: dict[str, list[Any]] = {}
    with open(os.path.join(path, _BYTES), "wb") as file:
        for name, parts in shards.items():
            for start, data in parts:
                index.setdefault(name, []).append([start, data.shape, file.tell()])
                file.write(data.reshape(-1).view(np.uint8).data)
    with open(os.path.join(path, _INDEX), "w", encoding="utf-8") as file:
        json.dump({"after": after, "shards": index}, file)


def _remove(path: str) -> None:
    """Deletes a checkpoint or a folder of them, as far as possible."""
    with contextlib.suppress(OSError):
        delete_checkpoint(path)


def _read_shards(paths: Iterable[str], arrays: contents.Arrays) -> dict[str, list[_Shard]]:
    """Returns the shards of each array in checkpoints of one step, as views of their files."""
    found: dict[str, dict[tuple[int, ...], _Shard]] = {}
    for path in paths:
        index = read_json(os.path.join(path, _INDEX))
        whole = np.memmap(os.path.join(path, _BYTES), np.uint8, mode="r")
        for name, parts in index["shards"].items():
            dtype = np.dtype(arrays[name][0])
            for start, shape, offset in parts:
                size = math.prod(shape) * dtype.itemsize
                data = whole[offset : offset + size].view(dtype).reshape(shape)
                found.setdefault(name, {}).setdefault(tuple(start), _Shard(tuple(start), data))
    return {name: list(parts.values()) for name, parts in found.items()}


def _assembled(name: str, struct: Any, shards: Iterable[_Shard]) -> jax.Array:
    """Returns an array of this process's shards, which are put together of saved ones.

    Raises:
        CheckpointMismatchError: If parts are missing.
    """
    sharding = struct.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    part = lambda index: _part(name, struct, index, shards)
    return jax.make_array_from_callback(struct.shape, sharding, part)


def _part(name: str, struct: Any, index: Any, shards: Iterable[_Shard]) -> np.ndarray:
    """Returns the part of an array at an index, from the shards that overlap it."""
    sizes = zip(index, struct.shape, strict=True)
    ranges = np.array([each.indices(size)[:2] for each, size in sizes], int).reshape(-1, 2)
    begin, end = ranges.T
    slices = lambda low, high: tuple(map(slice, low, high))
    result = np.empty(end - begin, struct.dtype)
    missing = result.size
    for start, data in shards:
        low, high = np.maximum(begin, start), np.minimum(end, np.add(start, data.shape))
        if (low < high).all():
            of_shard = slices(low - start, high - start)
            result[slices(low - begin, high - begin)] = data[of_shard]
            missing -= math.prod(high - low)
    if missing:
        raise CheckpointMismatchError(
            f"shards of {name!r} are on other hosts, as the mesh or the processes have changed."
        )
    return result
