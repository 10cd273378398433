"""The contents of a checkpoint: its record, and its arrays by path."""

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import re
import typing
from typing import Any, Self

from moelib.core import tree
from moelib.core.config import did_you_mean
from moelib.core.config_types import fits
from moelib.core.errors import MissingFileError, UserError
from moelib.runtime import storage

STEP_PREFIX = "step_"
RECORD_ITEM = "record"
STATE_ITEM = "state"
RECORD_FILE = os.path.join(RECORD_ITEM, "metadata")  # The file of Orbax's JSON item.

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
class CheckpointRecord:
    """The data stored with a checkpoint's arrays, as JSON."""

    step: int  # Steps taken.
    arrays: Arrays
    input: dict[str, Any] | None = None  # Position in the training data, as the input gave it.
    # Metrics of the evaluations at this step, by name.
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    # Identities of the data of the evaluations, by evaler.
    evaluated: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    config: str = ""  # Text of the trainer's config.
    files: dict[str, str] = dataclasses.field(default_factory=dict)  # SHA-256 of the run's files.
    mesh: dict[str, int] = dataclasses.field(default_factory=dict)  # Sizes of the mesh axes.
    versions: dict[str, str] = dataclasses.field(default_factory=dict)  # Versions of libraries.
    # Run, step and parts of the state that the run started from, if it was another one's.
    origin: dict[str, Any] = dataclasses.field(default_factory=dict)
    checksums: dict[str, str] = dataclasses.field(default_factory=dict)  # By path of an array.

    def write(self, path: str) -> None:
        """Writes the record of the checkpoint at `path`, with a digest of the record itself."""
        values = {"format": 1, **dataclasses.asdict(self)}
        text = json.dumps(values | {"digest": _digest(values)})
        if storage.is_remote(path):
            storage.write_bytes(os.path.join(path, RECORD_FILE), text.encode())
            return
        os.makedirs(os.path.join(path, RECORD_ITEM), exist_ok=True)
        with open(os.path.join(path, RECORD_FILE), "w", encoding="utf-8") as file:
            file.write(text)

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


def best_step(directory: str, metric: str, mode: str) -> int | None:
    """Returns the step with the best metric, the "min" or "max" one; None if no step has it."""
    judged = []
    for step, path in list_checkpoints(directory).items():
        with contextlib.suppress(UserError):  # A damaged one, which is reported elsewhere.
            value = CheckpointRecord.read(path).metrics.get(metric)
            if value is not None and value == value:
                judged.append((value if mode == "min" else -value, -step))
    return -min(judged)[1] if judged else None


def _digest(values: dict[str, Any]) -> str:
    """Returns the SHA-256 of JSON values, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


# Errors of the system that show damage: something else is at the path of a file.
_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}
# TensorStore and XLA raise ValueError and RuntimeError, with the status in the text alone:
# "UNAVAILABLE: ...", and for an error of the system "... [os_error_code='5']". INVALID_ARGUMENT has
# no such prefix. These are the statuses of content that is damaged or missing; all others, also
# those of later versions, are not taken for damage.
_STATUS = re.compile(
    r"\b(?!DATA_LOSS|FAILED_PRECONDITION|INVALID_ARGUMENT|NOT_FOUND|OUT_OF_RANGE)[A-Z]+(_[A-Z]+)*: "
)
_OS_ERROR = re.compile(r"\bos_error_code='(\d+)'")
# Errors of parsers and of TensorStore; any other type is not taken for damage either.
_OF_CONTENT = (ValueError, LookupError, TypeError, AttributeError, EOFError, OSError)


def unreadable(error: BaseException) -> bool:
    """Returns whether reading failed for a reason outside the file, whose content may be sound.

    Examples are a missing permission, a failing disk or network, too little memory, and an error
    of an unknown kind.
    """
    seen: BaseException | None = error
    of_content = False
    while seen is not None:
        if isinstance(seen, BaseExceptionGroup):
            return any(map(unreadable, seen.exceptions))
        codes = [seen.errno] if isinstance(seen, OSError) and seen.errno is not None else []
        codes += map(int, _OS_ERROR.findall(str(seen)))
        if codes and not _DAMAGE.issuperset(codes):
            return True
        if isinstance(seen, MemoryError) or (not codes and _STATUS.search(str(seen))):
            return True
        of_content = of_content or isinstance(seen, _OF_CONTENT)
        seen = seen.__cause__ or seen.__context__
    return not of_content


def step_path(directory: str, step: int) -> str:
    """Returns the folder of a step's checkpoint."""
    return os.path.join(directory, f"{STEP_PREFIX}{step:08d}")


def _step_of(path: str) -> int | None:
    """Returns the step in the name of a checkpoint's folder; None for other names."""
    found = re.fullmatch(rf"{STEP_PREFIX}([0-9]{{1,18}})", os.path.basename(path))
    return int(found[1]) if found else None


def list_checkpoints(directory: str) -> dict[int, str]:
    """Returns {step: path} of all complete checkpoints, oldest first.

    Incomplete ones, whose process was killed while it wrote or deleted them, have other names; on
    an object store, which renames nothing, they have no record.

    Raises:
        UserError: If the folder cannot be listed.
    """
    found = _step_folders(directory)
    if storage.is_remote(directory):
        found = {step: path for step, path in found.items() if _has_record(path)}
    return found


def list_unfinished(directory: str) -> list[str]:
    """Returns the folders of incomplete checkpoints of an object store."""
    return [path for path in _step_folders(directory).values() if not _has_record(path)]


def _has_record(path: str) -> bool:
    try:
        return storage.exists(os.path.join(path, RECORD_FILE))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error


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
