"""The contents of a checkpoint: its record, and its arrays by path."""

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
_RECORD_FILE = os.path.join(RECORD_ITEM, "metadata")  # The file of Orbax's JSON item.

Arrays = dict[str, Any]  # {"path/of/array": [dtype, [sizes]]}


class DamagedCheckpointError(UserError, RuntimeError):
    """A checkpoint cannot be read: it is incomplete, or parts of it are damaged."""


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
    config_hash: str = ""  # Hash of the settings that determine the run's numbers; may be empty.
    mesh: dict[str, int] = dataclasses.field(default_factory=dict)  # Sizes of the mesh axes.
    versions: dict[str, str] = dataclasses.field(default_factory=dict)  # Versions of libraries.

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values."""
        return {"format": 1, **dataclasses.asdict(self)}

    @classmethod
    def read(cls, path: str) -> Self:
        """Returns the record of the checkpoint at `path`.

        Raises:
            DamagedCheckpointError: If it is missing or damaged.
            OSError: If it cannot be read for an external reason: see `unreadable`.
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


# Messages of libraries without exceptions of their own (TensorStore, XLA): their codes, and any
# error of the system except a missing file and a folder at the path of a file.
_UNREADABLE = re.compile(
    "RESOURCE_EXHAUSTED|PERMISSION_DENIED|UNAUTHENTICATED|UNAVAILABLE|DEADLINE_EXCEEDED"
    rf"|(?:os_error_code='|OS error )(?!(?:{errno.ENOENT}|{errno.ENOTDIR}|{errno.EISDIR})\b)\d"
)


def unreadable(error: BaseException) -> bool:
    """Returns whether reading failed for a reason outside the file, whose content may be sound.

    Examples are a missing permission, a failing disk or network, and too little memory.
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
    """Returns the versions of Python and of the libraries that affect a run's numbers."""
    versions = {"python": platform.python_version()}
    for name in ("moelib", "jax", "jaxlib", "optax", "orbax-checkpoint", "numpy"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # A checkout that is not installed.
            versions[name] = "unknown"
    return versions


def step_path(directory: str, step: int) -> str:
    """Returns the folder of a step's checkpoint."""
    return os.path.join(directory, f"{STEP_PREFIX}{step:08d}")


def list_checkpoints(directory: str) -> dict[int, str]:
    """Returns {step: path} of all complete checkpoints, oldest first.

    Incomplete ones, whose process was killed while writing, have other names.
    """
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    numbers = {n: n.removeprefix(STEP_PREFIX) for n in names if n.startswith(STEP_PREFIX)}
    found = {int(x): os.path.join(directory, n) for n, x in numbers.items() if x.isdecimal()}
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
