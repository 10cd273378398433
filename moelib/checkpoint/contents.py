"""The contents of a checkpoint: its record, and its arrays by path."""

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import re
import typing
from typing import Any, Literal, Self

from moelib.checkpoint.policy import best_steps
from moelib.core.config import did_you_mean
from moelib.core.config_types import fits
from moelib.core.errors import MissingFileError, UserError
from moelib.runtime import storage
from moelib.runtime.storage import atomic_file, sync_folder
from moelib.runtime.versions import library_versions

STEP_PREFIX = "step_"
RECORD_ITEM = "record"
STATE_ITEM = "state"
RECORD_FILE = os.path.join(RECORD_ITEM, "metadata")
STARTED_FILE = "started"  # Beside arrays that are being written or deleted, without a record.

Arrays = dict[str, list[Any]]  # {"path/of/array": [dtype, [sizes]]}


class DamagedCheckpointError(UserError, RuntimeError):
    """A checkpoint cannot be read: it is incomplete, or parts of it are damaged."""


class UnreadableCheckpointError(UserError, RuntimeError):
    """A checkpoint that may be sound cannot be read: see `unreadable`."""


class CheckpointMismatchError(UserError):
    """The arrays of a checkpoint are not those that were requested."""


class CheckpointNotFoundError(MissingFileError):
    """There is no checkpoint, or none of the requested step."""


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """The data that a run stores with its state."""

    step: int  # Steps taken.
    input: dict[str, Any] | None = None  # Position in the training data, as the input gave it.
    # Metrics of the evaluations at this step, by name.
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    # Identities of the data of the evaluations, by evaler.
    evaluated: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    config: str = ""  # Text of the trainer's config.
    files: dict[str, str] = dataclasses.field(default_factory=dict)  # SHA-256 of the run's files.
    mesh: dict[str, int] = dataclasses.field(default_factory=dict)  # Sizes of the mesh axes.
    # Run, step and parts of the state that the run started from, if it was another one's.
    origin: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointRecord(RunRecord):
    """The data stored with a checkpoint's arrays, as JSON."""

    arrays: Arrays
    checksums: dict[str, str]  # By path of an array.
    versions: dict[str, str]  # Versions of libraries.

    @classmethod
    def of(cls, run: RunRecord, arrays: Arrays, checksums: dict[str, str]) -> Self:
        """Returns the record of a run's state with these arrays."""
        versions = library_versions()
        return cls(**vars(run), arrays=arrays, checksums=checksums, versions=versions)

    def write(self, path: str) -> None:
        """Writes the record of the checkpoint at `path`, with a digest of the record itself.

        The folder is a checkpoint from then on: all else must be on the disk before.
        """
        values = {"format": 1, **dataclasses.asdict(self)}
        text = json.dumps(values | {"digest": _digest(values)})
        folder = os.path.join(path, RECORD_ITEM)
        storage.make_folder(folder)
        with atomic_file(os.path.join(path, RECORD_FILE)) as file:
            file.write(text)
        sync_folder(folder)

    @classmethod
    def read(cls, path: str) -> Self:
        """Returns the record of the checkpoint at `path`.

        Raises:
            DamagedCheckpointError: If it is missing, damaged, or of another step than the folder.
            UnreadableCheckpointError: If it cannot be read for another reason: see `unreadable`.
        """
        file = os.path.join(path, RECORD_FILE)
        try:
            with storage.open_to_read(file, encoding="utf-8") as f:
                values = json.load(f)
            if values.pop("digest", None) != _digest(values):
                raise ValueError("its content differs from its digest")
            if (version := values.pop("format")) != 1:
                raise ValueError(f"format={version!r:.80} is of another version of this library")
            record = cls(**values)
            _check_values(record)
            if record.checksums.keys() != record.arrays.keys():
                raise ValueError("it lacks checksums of arrays")
            if _step_of(path) not in (None, record.step):
                raise ValueError(f"it is the record of step {record.step}")
        except FileNotFoundError:
            raise DamagedCheckpointError(f"{path}: the file {RECORD_FILE} is missing.") from None
        except Exception as error:
            kind = UnreadableCheckpointError if unreadable(error) else DamagedCheckpointError
            raise kind(f"{file} cannot be read: {error}.") from error
        return record


def _check_values(record: CheckpointRecord) -> None:
    """Raises ValueError if a value of a record is of a wrong type."""
    for name, annotation in typing.get_type_hints(CheckpointRecord).items():
        if not fits(value := getattr(record, name), annotation):
            raise ValueError(f"{name}={value!r:.80}")
    for name, array in record.arrays.items():
        if len(array) != 2 or not fits(array[0], str) or not fits(array[1], list[int]):
            raise ValueError(f"arrays has {array!r:.80} for {name}")
    if outside := [name for name in record.files if os.path.basename(name) != name]:
        raise ValueError(f"files has {outside[0]!r:.80}, which is not in its folder")


def newest_record(directory: str, step: int | None = None) -> CheckpointRecord | None:
    """Returns the newest record that can be read, or that of `step`; None if there is none.

    Raises:
        UnreadableCheckpointError: If a record cannot be read, and is not damaged.
    """
    for each, path in reversed(list_checkpoints(directory).items()):
        if step in (None, each):
            with contextlib.suppress(DamagedCheckpointError):
                return CheckpointRecord.read(path)
    return None


def best_step(directory: str, metric: str, mode: Literal["min", "max"]) -> int | None:
    """Returns the step with the best metric, the "min" or "max" one; None if no step has it."""
    metrics = {}
    for step, path in list_checkpoints(directory).items():
        with contextlib.suppress(UserError):  # A damaged one, which is reported elsewhere.
            metrics[step] = CheckpointRecord.read(path).metrics.get(metric)
    return next(iter(best_steps(metrics, mode)), None)


def _digest(values: dict[str, Any]) -> str:
    """Returns the SHA-256 of JSON values, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


# Errors of the system that show damage: something else is at the path of a file.
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
# Errors about content, of parsers; any other type, such as one of memory, is not taken for damage.
_OF_CONTENT = (ValueError, LookupError, TypeError, AttributeError, EOFError)


def unreadable(error: BaseException) -> bool:
    """Returns whether reading failed for a reason outside the file, whose content may be sound.

    Examples are a missing permission, a failing disk or network, too little memory, and an error
    of an unknown kind.
    """
    if isinstance(error, OSError):
        return error.errno not in _DAMAGE
    return not isinstance(error, _OF_CONTENT)


def step_path(directory: str, step: int) -> str:
    """Returns the folder of a step's checkpoint."""
    return os.path.join(directory, f"{STEP_PREFIX}{step:08d}")


def _step_of(path: str) -> int | None:
    """Returns the step in the name of a checkpoint's folder; None for other names."""
    found = re.fullmatch(rf"{STEP_PREFIX}([0-9]{{1,18}})", os.path.basename(path))
    return int(found[1]) if found else None


def list_checkpoints(directory: str) -> dict[int, str]:
    """Returns {step: path} of all complete checkpoints, oldest first.

    A folder is a checkpoint when it has its record, which is written last and deleted first.

    Raises:
        UserError: If the folder cannot be listed.
    """
    return {step: path for step, path in _step_folders(directory).items() if _has_record(path)}


def list_unfinished(directory: str) -> list[str]:
    """Returns the folders of checkpoints whose process was killed while it wrote or deleted them.

    Raises:
        UserError: If the folder cannot be listed.
    """
    return [path for path in _step_folders(directory).values() if not _has_record(path)]


def list_lost(directory: str) -> list[str]:
    """Returns the folders after the newest checkpoint that have lost their record, oldest first.

    A folder with `STARTED_FILE` is of a process that was killed while it wrote or deleted one.

    Raises:
        UserError: If the folder cannot be listed.
    """
    found = {path: _has_record(path) for path in _step_folders(directory).values()}
    newest = max((i for i, has_record in enumerate(found.values()) if has_record), default=-1)
    return [path for path in [*found][newest + 1 :] if _has_only_arrays(path)]


def _has_only_arrays(path: str) -> bool:
    try:
        names = storage.list_names(path)
    except OSError:  # No folder, or one that another process has just deleted.
        return False
    return STATE_ITEM in names and STARTED_FILE not in names


def _has_record(path: str) -> bool:
    try:
        storage.size(os.path.join(path, RECORD_FILE))
    except OSError as error:
        if unreadable(error):
            raise UserError(f"{path} cannot be read: {error.strerror}.") from error
        return False
    return True


def delete_checkpoint(path: str) -> None:
    """Deletes a checkpoint, or whatever is at its path; incomplete if killed. Raises OSError."""
    record = os.path.join(path, RECORD_FILE)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if not os.path.islink(path) and storage.size(record) >= 0:
            with contextlib.suppress(OSError):  # A full disk; else its record would look lost.
                storage.write_bytes(os.path.join(path, STARTED_FILE), b"")
            storage.remove(record)
    storage.remove_tree(path)


def move_checkpoint(path: str, to: str) -> None:
    """Renames a checkpoint, or copies and then deletes it on an object store."""
    if not storage.is_remote(path):
        os.rename(path, to)
        return
    storage.copy_tree(path, to)
    delete_checkpoint(path)


def _step_folders(directory: str) -> dict[int, str]:
    try:
        names = storage.list_names(directory)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise UserError(f"{directory} cannot be listed: {error.strerror}.") from error
    steps = {os.path.join(directory, name): _step_of(name) for name in names}
    found = {step: path for path, step in steps.items() if step is not None}
    return dict(sorted(found.items()))


def describe_arrays(state: Any) -> Arrays:
    """Returns dtype and sizes of every array of a tree, by path."""
    from moelib.core import tree  # It imports JAX, which readers of records do not need.

    return {path: [str(x.dtype), list(x.shape)] for path, x in tree.flatten_items(state)}


def check_arrays(saved: Arrays, wanted: Arrays, path: str) -> None:
    """Checks that a checkpoint has exactly the requested arrays.

    Raises:
        CheckpointMismatchError: If not; the message has the first path that differs and both
            shapes.
    """
    advice = "it was written by another config; restore it with that one, or set another directory."
    for name, (dtype, shape) in wanted.items():
        if name not in saved:
            raise CheckpointMismatchError(
                f"{path} has no array {name!r} (wanted: {_shape(dtype, shape)}); "
                f"{did_you_mean(name, saved.keys() - wanted.keys() or saved)} If so, {advice}"
            )
        if saved[name] != [dtype, shape]:
            raise CheckpointMismatchError(
                f"{path}: {name!r} is {_shape(*saved[name])} in the checkpoint, and "
                f"{_shape(dtype, shape)} in this run; {advice}"
            )
    if extra := [name for name in saved if name not in wanted]:
        raise CheckpointMismatchError(
            f"{path} has an array {extra[0]!r}, {_shape(*saved[extra[0]])}, that this run lacks; "
            f"{advice}"
        )


def _shape(dtype: str, sizes: list[int]) -> str:
    return f"{dtype}{list(sizes)}"
