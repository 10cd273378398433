"""Files written as a whole: readers see the old content or the new one, never a part; caches."""

import contextlib
import json
import os
from collections.abc import Iterator
from typing import IO, Any

from moelib.core.errors import UserError


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[IO[str]]:
    """Opens a temporary text file next to `path`, which replaces `path` when the block ends.

    The content is synced to disk first. An error inside the block leaves `path` as it was.
    """
    temporary = f"{os.fspath(path)}.tmp-{os.getpid()}"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_json(path: str | os.PathLike[str], value: Any, *, indent: int | None = 2) -> None:
    """Writes `value` as JSON with a final newline, atomically."""
    with atomic_file(path) as file:
        json.dump(value, file, indent=indent)
        file.write("\n")


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the object in a JSON file; an empty one if there is no such file.

    Raises:
        UserError: If the file holds something else.
    """
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
        if not isinstance(value, dict):
            raise ValueError(f"it holds a {type(value).__name__}")
        return value
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError(f"{path} is not a JSON object ({error}); fix or remove it.") from error


def user_cache_dir(name: str) -> str:
    """Returns the user's folder for the cache `name` of the library, which may not exist yet."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(folder, "moelib", name)
