"""Reading checkpoints under any mesh: all of one, or the parameters alone."""

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from moelib.checkpoint import checksums, contents
from moelib.checkpoint.arrays import read_arrays
from moelib.checkpoint.contents import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointRecord,
    DamagedCheckpointError,
    UnreadableCheckpointError,
    unreadable,
)
from moelib.core import tree
from moelib.core.errors import UserError, first_line
from moelib.runtime import storage
from moelib.runtime.processes import agreed, gather_json

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Restored(NamedTuple):
    """A checkpoint in memory."""

    state: Any  # Arrays in the requested structure.
    record: CheckpointRecord
    path: str  # Folder of the checkpoint.


def restore_checkpoint(path: str, target: Any, *, skip_checksums: bool = False) -> Restored:
    """Returns the checkpoint at `path` in the structure and shardings of the target.

    Args:
        path: Folder of the checkpoint.
        target: Tree of `jax.ShapeDtypeStruct`, with shardings or without.
        skip_checksums: Whether the arrays are not compared with their checksums.

    Raises:
        CheckpointMismatchError: If the arrays are not those of the target.
        DamagedCheckpointError: If it is damaged.
        UnreadableCheckpointError: If it cannot be read for another reason.
    """
    record = _read_record(path, target)
    nested = _read(path, tree.to_nested(target))
    check_restored(path, nested, record, skip_checksums=skip_checksums)
    return Restored(tree.from_nested(nested, target), record, path)


def restore_params_only(
    directory: str,
    target: Any,
    *,
    step: int | None = None,
    skip_checksums: bool = False,
    partial: bool = False,
) -> Restored:
    """Returns the parameters that the learner evaluates; reads nothing else.

    They are the average of the model's parameters, or the evaluation point of a schedule-free
    optimizer, where the learner's state holds them.

    Args:
        directory: Folder of the checkpoints.
        target: Nested dict of `jax.ShapeDtypeStruct`, with shardings or without.
        step: Step of the checkpoint; None for the newest that can be read.
        skip_checksums: Whether the arrays are not compared with their checksums.
        partial: Whether the checkpoint may have more parameters than the target.

    Raises:
        CheckpointMismatchError: If the parameters are not those of the target.
        CheckpointNotFoundError: If there is no checkpoint.
        DamagedCheckpointError: If none can be read.
    """
    found = find_checkpoints(storage.absolute(directory), step, required=True)
    read = lambda path: _restore_params(path, target, skip_checksums, partial)
    return newest_readable(found, read)


def restore_arrays(
    directory: str, *, step: int | None = None, skip_checksums: bool = False
) -> Restored:
    """Returns all arrays of a checkpoint as {path: array}; needs no config.

    Args:
        directory: Folder of the checkpoints.
        step: Step of the checkpoint; None for the newest that can be read.
        skip_checksums: Whether the arrays are not compared with their checksums.

    Raises:
        CheckpointNotFoundError: If there is no checkpoint.
        DamagedCheckpointError: If none can be read.
    """

    def read(path: str) -> Restored:
        record = on_all_processes(lambda: CheckpointRecord.read(path), path)
        target = {
            name: jax.ShapeDtypeStruct(shape, np.dtype(dtype))
            for name, (dtype, shape) in record.arrays.items()
        }
        return restore_checkpoint(path, target, skip_checksums=skip_checksums)

    return newest_readable(find_checkpoints(storage.absolute(directory), step, required=True), read)


_AVERAGE = "learner/ema/params/"


def _restore_params(path: str, target: Any, skip_checksums: bool, partial: bool) -> Restored:
    wanted = contents.describe_arrays(target)
    record = _read_record(path, target, prefix="model/", partial=partial)
    averages = {
        name: _AVERAGE + name
        for name, (_, shape) in wanted.items()
        if record.arrays.get(_AVERAGE + name, [""])[1:] == [shape]
    }
    sources = {name: averages.get(name, f"model/{name}") for name in wanted}
    # The state of `optax.contrib.schedule_free` for each parameter whose average it stands for.
    bases = _schedule_free_bases(record.arrays)
    bases = {name: bases[name] for name in bases.keys() & wanted.keys() - averages.keys()}
    leaves = tree.by_path(target)

    def struct(source: str, like: Any) -> jax.ShapeDtypeStruct:
        dtype, shape = record.arrays[source]
        sharding = getattr(like, "sharding", None)
        return jax.ShapeDtypeStruct(shape, np.dtype(dtype), sharding=sharding)

    arrays = {source: struct(source, leaves[name]) for name, source in sources.items()}
    for name, base in bases.items():
        arrays[f"{base}b1"] = struct(f"{base}b1", None)  # A scalar, read by each process.
        arrays[f"{base}z/{name}"] = struct(f"{base}z/{name}", leaves[name])
    nested = _read(path, tree.unflatten(arrays))
    check_restored(path, nested, record, skip_checksums=skip_checksums)
    read = tree.by_path(nested)
    params = {name: read[source] for name, source in sources.items()}
    for name, base in bases.items():  # As optax.contrib.schedule_free_eval_params.
        b1 = np.asarray(read[f"{base}b1"])
        params[name] = (params[name] - (1 - b1) * read[f"{base}z/{name}"]) / b1
    params = {name: x.astype(wanted[name][0]) for name, x in params.items()}
    return Restored(tree.from_nested(tree.unflatten(params), target), record, path)


def _schedule_free_bases(arrays: contents.Arrays) -> dict[str, str]:
    """Returns {path of a parameter: path of the schedule-free state that holds its `z`}."""
    found = {}
    for name in arrays:
        base, separator, param = name.partition("/z/")
        if separator and f"{base}/b1" in arrays and f"{base}/max_lr" in arrays:
            found[param] = f"{base}/"
    return found


def _read_record(
    path: str, target: Any, *, prefix: str = "", partial: bool = False
) -> CheckpointRecord:
    """Returns a checkpoint's record, if its arrays below `prefix` are those of the target."""

    def read() -> CheckpointRecord:
        record = CheckpointRecord.read(path)
        saved = {
            name.removeprefix(prefix): array
            for name, array in record.arrays.items()
            if name.startswith(prefix)
        }
        wanted = contents.describe_arrays(target)
        if partial:
            saved = {name: array for name, array in saved.items() if name in wanted}
        contents.check_arrays(saved, wanted, path)
        return record

    return on_all_processes(read, path)


def _read(path: str, target: dict[str, Any]) -> dict[str, Any]:
    """Returns the arrays of a nested dict of targets, on one device if they have no sharding.

    Raises:
        DamagedCheckpointError: If a process finds them damaged.
        UnreadableCheckpointError: If a process cannot read them for another reason.
    """
    one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    target = jax.tree.map(lambda x: x if x.sharding else x.update(sharding=one), target)
    return on_all_processes(lambda: read_arrays(path, target), path)


def check_restored(
    path: str, nested: dict[str, Any], record: CheckpointRecord, *, skip_checksums: bool
) -> None:
    """Compares arrays that were read from `path` with its record; all processes must call it.

    Raises:
        DamagedCheckpointError: If the checksum of an array differs, or the state's step, in any
            process: of a replicated array, each process compares its own replica.
    """
    arrays = tree.by_path(nested)
    found = {}
    if not skip_checksums:
        found = checksums.finish_checksums(checksums.start_checksums(arrays))
    on_all_processes(lambda: _compare(path, arrays, record, found), path)


def _compare(
    path: str, arrays: Mapping[str, Any], record: CheckpointRecord, found: Mapping[str, str]
) -> None:
    """Raises DamagedCheckpointError if the state's step or a checksum is not the record's."""
    step = arrays.get("step")
    if step is not None and step.ndim == 0 and int(step) != record.step:
        raise DamagedCheckpointError(
            f"{path} holds the state of step {int(step)}, and the record of step {record.step}."
        )
    if wrong := [name for name in found if found[name] != record.checksums.get(name)]:
        more = f" and {len(wrong) - 1} more arrays differ" if len(wrong) > 1 else " differs"
        raise DamagedCheckpointError(f"{path}: {wrong[0]!r}{more} from the checksum in the record.")


# -- Finding -------------------------------------------------------------------------------------


def find_checkpoints(
    directory: str, step: int | None = None, *, required: bool = False
) -> dict[int, str]:
    """Returns {step: path} of the complete checkpoints that process 0 sees, oldest first.

    If `step` is given, only the checkpoint of that step is returned; else a warning names those
    after the newest whose record is lost.

    Raises:
        CheckpointNotFoundError: If there is none, of the step or, if required, at all.
    """
    found = on_all_processes(lambda: contents.list_checkpoints(directory), directory)
    steps = gather_json(list(found))[0]
    found = {each: found.get(each, contents.step_path(directory, each)) for each in steps}
    if step is None and found and jax.process_index() == 0:
        warn_lost(directory, max(found))
    if step is None and (found or not required):
        return found
    if step in found:
        return {step: found[step]}
    wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    there = f"there are steps {', '.join(map(str, found))}." if found else "the folder has none."
    run = os.path.dirname(os.path.abspath(directory))
    if not found and not storage.is_remote(directory) and not os.path.isdir(run):
        there = f"there is no folder {run}."
    lost = [os.path.basename(path) for path in contents.list_lost(directory)]
    if step is not None:
        lost = [name for name in lost if name == os.path.basename(contents.step_path("", step))]
    cure = f" {lost[-1]} lacks its {contents.RECORD_FILE}: put it back." if lost else ""
    raise CheckpointNotFoundError(f"{directory}: {wanted}; {there}{cure}")


def warn_lost(directory: str, newest: int) -> None:
    """Logs a warning that names the checkpoints after the newest whose record is lost."""
    for path in contents.list_lost(directory):
        logger.warning(
            "%s has no %s, and is not read: step %d is the newest checkpoint. Put the file back to "
            "read it.",
            *(path, contents.RECORD_FILE, newest),
        )


def newest_readable(
    found: dict[int, str],
    read: Callable[[str], T],
    on_damage: Callable[[int], None] = lambda step: None,
) -> T:
    """Returns the result of `read` for the newest checkpoint that is not damaged.

    `found` holds at least one path by step, oldest first; `on_damage` gets the damaged steps.

    Raises:
        CheckpointMismatchError: If its arrays are not those of the target.
        DamagedCheckpointError: If all are damaged.
    """
    damages: list[str] = []
    for step, path in reversed(found.items()):
        try:
            return read(path)
        except DamagedCheckpointError as error:
            on_damage(step)
            damages.append(str(error))
            logger.warning("Damaged checkpoint, trying the one before: %s", error)
        except CheckpointMismatchError as error:
            if not damages:
                raise
            raise CheckpointMismatchError(
                f"{error} It was tried as the newer ones are damaged; restore one of them from "
                "a copy, or read it as it is with --skip_checksums:\n  " + "\n  ".join(damages)
            ) from None
    raise DamagedCheckpointError("every checkpoint is damaged:\n  " + "\n  ".join(damages))


# -- Agreement of processes ----------------------------------------------------------------------

_KINDS = (DamagedCheckpointError, CheckpointMismatchError, UnreadableCheckpointError)


def on_all_processes(read: Callable[[], T], path: str) -> T:
    """Returns the result of `read`, once it has succeeded on all processes; see `agreed`.

    An error of a reason outside the files at `path` becomes an UnreadableCheckpointError.
    """

    def checked() -> T:
        try:
            return read()
        except UserError:
            raise
        except Exception as error:
            if not unreadable(error):
                raise
            text = f"{path} cannot be read ({first_line(error)}), but may be sound."
            raise UnreadableCheckpointError(text) from error

    return agreed(checked, _KINDS)
