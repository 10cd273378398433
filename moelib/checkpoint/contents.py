"""What lies in a checkpoint: its record, its arrays by path, and whether they fit a target."""

import dataclasses
import errno
import importlib.metadata
import json
import os
import platform
import re
from typing import Any, Self

from moelib.core import tree
from moelib.core.config import did_you_mean
from moelib.core.errors import MissingFileError, UserError

STEP_PREFIX = "step_"
RECORD_ITEM = "record"
STATE_ITEM = "state"
_RECORD_FILE = os.path.join(RECORD_ITEM, "metadata")  # Where Orbax writes a JSON item.

Arrays = dict[str, Any]  # {"path/of/array": [dtype, [sizes]]}


class DamagedCheckpointError(UserError, RuntimeError):
    """A checkpoint that cannot be read: torn, or parts of it are missing."""


class CheckpointMismatchError(UserError):
    """A checkpoint whose arrays are not those that are asked for."""


class CheckpointNotFoundError(MissingFileError):
    """There is no checkpoint where one was asked for."""


@dataclasses.dataclass(frozen=True)
class CheckpointRecord:
    """What is written beside a checkpoint's arrays, as JSON.

    Attributes:
        step: Steps taken.
        arrays: dtype and sizes of every array, by path.
        input: Place in the training data, as the input gave it; None if it was not saved.
        metrics: Numbers of the evaluations at this step, by name.
        config_hash: Of what decides the run's numbers; empty if there is none.
        mesh: Sizes of the mesh axes at the time.
        versions: Of the libraries that wrote it.
    """

    step: int
    arrays: Arrays
    input: dict[str, Any] | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    config_hash: str = ""
    mesh: dict[str, int] = dataclasses.field(default_factory=dict)
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values."""
        return {"format": 1, **dataclasses.asdict(self)}

    @classmethod
    def read(cls, path: str) -> Self:
        """Returns the record of the checkpoint at `path`.

        Raises:
            DamagedCheckpointError: If it is missing or torn.
            OSError: If it cannot be read for a reason that is not its own: see `unreadable`.
        """
        file = os.path.join(path, _RECORD_FILE)
        try:
            with open(file, encoding="utf-8") as f:
                values = json.load(f)
            values.pop("format")
            return cls(**values)
        except FileNotFoundError:
            raise DamagedCheckpointError(f"{path}: the file {_RECORD_FILE} is missing.") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if unreadable(error):
                raise
            raise DamagedCheckpointError(f"{file} cannot be read: {error}.") from error


# What the message of a library without exceptions of its own (TensorStore, XLA) says of it: the
# codes, and any error of the system but that there is no such file, or a folder in its place.
_UNREADABLE = re.compile(
    "RESOURCE_EXHAUSTED|PERMISSION_DENIED|UNAUTHENTICATED|UNAVAILABLE|DEADLINE_EXCEEDED"
    rf"|(?:os_error_code='|OS error )(?!(?:{errno.ENOENT}|{errno.ENOTDIR}|{errno.EISDIR})\b)\d"
)


def unreadable(error: BaseException) -> bool:
    """Returns whether something kept a file from being read that says nothing of what is in it.

    No permission, a disk or network that fails, too little memory: what is there may be sound.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, BaseExceptionGroup) and any(map(unreadable, seen.exceptions)):
            return True
        missing = isinstance(seen, FileNotFoundError | NotADirectoryError | IsADirectoryError)
        if isinstance(seen, OSError) and seen.errno is not None and not missing:
            return True
        if isinstance(seen, MemoryError) or _UNREADABLE.search(str(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def library_versions() -> dict[str, str]:
    """Returns the versions of Python and of the libraries that decide what a run computes."""
    versions = {"python": platform.python_version()}
    for name in ("moelib", "jax", "jaxlib", "optax", "orbax-checkpoint", "numpy"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # Used from a checkout.
            versions[name] = "unknown"
    return versions


def step_path(directory: str, step: int) -> str:
    """Returns the folder of a step's checkpoint."""
    return os.path.join(directory, f"{STEP_PREFIX}{step:08d}")


def list_checkpoints(directory: str) -> dict[int, str]:
    """Returns {step: path} of all complete checkpoints, oldest first.

    Those that were never finished (a process was killed while it wrote) have other names.
    """
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    found = {}
    for name in names:
        number = name.removeprefix(STEP_PREFIX)
        if name.startswith(STEP_PREFIX) and number.isdigit():
            found[int(number)] = os.path.join(directory, name)
    return dict(sorted(found.items()))


def latest_checkpoint(directory: str) -> str | None:
    """Returns the path of the newest complete checkpoint, or None."""
    found = list_checkpoints(directory)
    return found[max(found)] if found else None


def describe_arrays(state: Any) -> Arrays:
    """Returns dtype and sizes of every array of a tree, by path."""
    return {path: [str(x.dtype), list(x.shape)] for path, x in tree.flatten_items(state)}


def check_arrays(saved: Arrays, wanted: Arrays, path: str) -> None:
    """Checks that a checkpoint has the arrays that are wanted.

    Raises:
        CheckpointMismatchError: If not; the message holds the first path that differs and both
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
    for name in saved:
        if name not in wanted:
            raise CheckpointMismatchError(
                f"{path} has an array {name!r}, {_shape(*saved[name])}, that this run has not; "
                f"{advice}"
            )


def _shape(dtype: str, sizes: list[int]) -> str:
    return f"{dtype}{list(sizes)}"
