"""Files written as a whole: readers see the old content or the new one, never a part; caches."""

import contextlib
import errno
import io
import json
import os
import shutil
from collections.abc import Iterator
from typing import IO, Any

from moelib.core.errors import MissingFileError, UserError
from moelib.runtime import storage


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Names the file that the block writes in errors of the system that name none."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = os.fspath(path)
        raise


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str], *, binary: bool = False) -> Iterator[IO[Any]]:
    """Opens a temporary file next to `path`, which replaces `path` when the block ends.

    The content is synced to disk first; an object is written when the block ends. An error inside
    the block leaves `path` as it was.
    """
    if storage.is_remote(path):
        content = io.BytesIO()
        yield (file := content if binary else io.TextIOWrapper(content, "utf-8"))
        file.flush()
        storage.write_bytes(os.fspath(path), content.getvalue())
        return
    temporary = f"{os.fspath(path)}.tmp-{os.getpid()}"
    try:
        mode, encoding = ("wb", None) if binary else ("w", "utf-8")
        with writing(path), open(temporary, mode, encoding=encoding) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def sync_folder(path: str | os.PathLike[str], *, recursive: bool = False) -> None:
    """Waits until the names in a folder and, if recursive, all files below it are on the disk.

    Objects are, once written.
    """
    if storage.is_remote(path):
        return
    for folder, _, names in os.walk(path) if recursive else [(path, (), ())]:
        for name in (*names, "."):
            descriptor = os.open(os.path.join(folder, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            except OSError as error:
                if error.errno != errno.EINVAL or name != ".":  # Some file systems sync no folders.
                    raise
            finally:
                os.close(descriptor)


def write_json(path: str | os.PathLike[str], value: Any, *, indent: int | None = 2) -> None:
    """Writes `value` as JSON with a final newline, atomically."""
    with atomic_file(path) as file:
        json.dump(value, file, indent=indent)
        file.write("\n")


@contextlib.contextmanager
def readable(path: str | os.PathLike[str]) -> Iterator[None]:
    """Names the file that the block reads in errors of the system, which become UserErrors."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        if error.errno is None:  # A library's, about the content.
            raise
        kind = MissingFileError if isinstance(error, FileNotFoundError) else UserError
        raise kind(f"{path} cannot be read: {error.strerror}.") from error


def read_text(path: str | os.PathLike[str]) -> str:
    """Returns the text of a file in UTF-8. Raises UserError if it cannot be read."""
    with readable(path), storage.open_to_read(path, encoding="utf-8") as file:
        try:
            return file.read()
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not text in UTF-8 ({error}); restore the file.") from error


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text. Raises ValueError, also if it is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the object in a JSON file; an empty one if there is no such file.

    Raises:
        UserError: If it cannot be read, or holds something else.
    """
    try:
        with storage.open_to_read(path, encoding="utf-8") as file:
            value = parse_json(file.read())
        if not isinstance(value, dict):
            raise ValueError(f"it holds a {type(value).__name__}")
        return value
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path} is not a JSON object ({reason}); fix or remove it.") from error


def copy_file(source: str, target: str) -> None:
    """Copies a file or an object as a whole, with the permissions of a new file."""
    with storage.open_to_read(source, "rb") as read, atomic_file(target, binary=True) as file:
        shutil.copyfileobj(read, file)


def user_cache_dir(name: str) -> str:
    """Returns the user's folder for the cache `name` of the library, which may not exist yet."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(folder, "moelib", name)
