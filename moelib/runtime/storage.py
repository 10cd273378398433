"""Files in folders that are local paths, or URLs of object stores: s3://, gs://, others of fsspec.

An object is written as a whole, as is an `atomic_file`: readers see the old content or the new one,
never a part. Errors of a store are errors of the system: FileNotFoundError, PermissionError,
OSError. Local paths take the calls of Python's own library, with its costs and errors.
"""

import concurrent.futures
import contextlib
import errno
import io
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from typing import IO, Any

from moelib.core.errors import MissingFileError, UserError

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}  # Extras of moelib, by scheme.
_CODES = {
    FileNotFoundError: errno.ENOENT,
    PermissionError: errno.EACCES,
    FileExistsError: errno.EEXIST,
    IsADirectoryError: errno.EISDIR,
}
_UPLOAD_SECONDS = 60.0  # Minimum time between two uploads of a file that grows.
_UPLOAD_SHARE = 0.05  # Largest share of the time that uploads of a file take.


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path is a URL."""
    return "://" in os.fspath(path)


def absolute(path: str | os.PathLike[str]) -> str:
    """Returns the absolute path of a folder; of a URL, itself without a final slash."""
    path = os.fspath(path)
    return path.rstrip("/") if is_remote(path) else os.path.abspath(path)


def require_local(setting: str, path: str | os.PathLike[str], cure: str) -> None:
    """Raises UserError if a path is a URL."""
    if is_remote(path):
        raise UserError(f"{setting} is {os.fspath(path)!r}; set a local folder, and {cure}.")


def filesystem(path: str | os.PathLike[str]) -> Any:
    """Returns fsspec's file system of a URL; its listings are not cached.

    Raises:
        UserError: If no installed package serves such URLs.
    """
    import fsspec

    path = os.fspath(path)
    scheme = path.partition("://")[0]
    try:
        found = fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        cure = f"{error}; install it, or use a local path, s3://, or gs://."
        if extra := _EXTRAS.get(scheme):
            cure = f"its package is missing; run `pip install 'moelib[{extra}]'`."
        raise UserError(f"{path}: {cure}") from error
    return found(use_listings_cache=False)


@contextlib.contextmanager
def _system_errors(path: str) -> Iterator[None]:
    """Turns errors of a store's package into those of the system, which name the path."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        code = next((c for kind, c in _CODES.items() if isinstance(error, kind)), errno.EIO)
        lines = str(error).strip().splitlines() or [type(error).__name__]
        text = "no such object or bucket" if code == errno.ENOENT else lines[0][:300]
        raise OSError(code, text, path) from error


def exists(path: str | os.PathLike[str]) -> bool:
    """Returns whether there is a file, an object or a folder."""
    path = os.fspath(path)
    if not is_remote(path):
        return os.path.exists(path)
    # Not fsspec's `exists`, which some stores answer with False if they cannot be reached.
    with contextlib.suppress(FileNotFoundError), _system_errors(path):
        filesystem(path).info(path)
        return True
    return False


def list_names(folder: str) -> list[str]:
    """Returns the names in a folder. Raises OSError if it does not exist or cannot be listed."""
    if not is_remote(folder):
        return os.listdir(folder)
    with _system_errors(folder):
        found = filesystem(folder).ls(folder, detail=False)
        return [x for each in found if (x := os.path.basename(each.rstrip("/")))]


def size(path: str) -> int:
    """Returns the number of bytes of a file or an object. Raises OSError."""
    if not is_remote(path):
        return os.path.getsize(path)
    with _system_errors(path):
        return filesystem(path).info(path)["size"]


def make_folder(folder: str) -> None:
    """Creates a folder that is missing; an object store needs none."""
    if not is_remote(folder):
        os.makedirs(folder, exist_ok=True)


def read_bytes(path: str, start: int | None = None, end: int | None = None) -> bytes:
    """Returns the bytes [start, end) of an object. Raises OSError."""
    with _system_errors(path):
        return filesystem(path).cat_file(path, start=start, end=end)


def read_ranges(paths: list[str], starts: list[int], ends: list[int]) -> list[bytes]:
    """Returns the bytes [start, end) of each object, by concurrent requests. Raises OSError."""
    with _system_errors(paths[0]):
        return filesystem(paths[0]).cat_ranges(paths, starts, ends, on_error="raise")


def write_bytes(path: str, data: bytes, *, only_if_absent: bool = False) -> None:
    """Writes a file or an object. Raises OSError; FileExistsError if it exists and must not."""
    if not is_remote(path):
        with open(path, "xb" if only_if_absent else "wb") as file:
            file.write(data)
        return
    with _system_errors(path):
        filesystem(path).pipe_file(path, data, mode="create" if only_if_absent else "overwrite")


def remove(path: str) -> None:
    """Removes a file or an object, if it exists. Raises OSError."""
    if not is_remote(path):
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)
        return
    with contextlib.suppress(FileNotFoundError), _system_errors(path):
        filesystem(path).rm_file(path)


def remove_tree(folder: str) -> None:
    """Removes a folder, or a file or a link in its place, if it exists. Raises OSError."""
    if not is_remote(folder):
        with contextlib.suppress(FileNotFoundError):
            if os.path.isdir(folder) and not os.path.islink(folder):
                shutil.rmtree(folder)
            else:
                os.unlink(folder)
        return
    with contextlib.suppress(FileNotFoundError), _system_errors(folder):
        filesystem(folder).rm(folder, recursive=True)


def copy_tree(folder: str, to: str) -> None:
    """Copies all objects below a URL to another one of the same store. Raises OSError."""
    with _system_errors(folder):
        filesystem(folder).copy(f"{folder}/", f"{to}/", recursive=True)


def open_to_read(path: str | os.PathLike[str], mode: str = "r", **options: Any) -> Any:
    """Opens a file to read, as `open` does; an object is read as a whole."""
    path = os.fspath(path)
    if not is_remote(path):
        return open(path, mode, **options)
    data = io.BytesIO(read_bytes(path))
    return data if "b" in mode else io.TextIOWrapper(data, **options)


def open_to_append(path: str) -> Any:
    """Opens a file to append to, in a folder that is created if it is missing.

    An object is uploaded as a whole: see `GrowingObject`.
    """
    if is_remote(path):
        return GrowingObject(path)
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    return open(path, "ab")


# -- Whole files -----------------------------------------------------------------------------------


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
    the block leaves a file as it was. Pipes and devices are not replaced, but written to.
    """
    if is_remote(path):
        content = io.BytesIO()
        yield (file := content if binary else io.TextIOWrapper(content, "utf-8"))
        file.flush()
        write_bytes(os.fspath(path), content.getvalue())
        return
    mode, encoding = ("wb", None) if binary else ("w", "utf-8")
    if os.path.dirname(path) == "/dev" or (os.path.exists(path) and not os.path.isfile(path)):
        # Opened by its name, a standard stream would truncate the file that it is redirected to.
        stream = {"/dev/stdout": sys.stdout, "/dev/stderr": sys.stderr}.get(os.fspath(path))
        if stream is not None:
            stream.flush()
        target = path if stream is None else os.dup(stream.fileno())
        with writing(path), open(target, mode, encoding=encoding) as file:
            yield file
        return
    temporary = f"{os.fspath(path)}.tmp-{os.getpid()}"
    try:
        with writing(path), open(temporary, mode, encoding=encoding) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.filename == temporary:
            error.filename = os.fspath(path)
        raise


def sync_folder(path: str | os.PathLike[str], *, recursive: bool = False) -> None:
    """Waits until the names in a folder and, if recursive, all files below it are on the disk.

    Objects are, once written.
    """
    if is_remote(path):
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
    with readable(path), open_to_read(path, encoding="utf-8") as file:
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
        with open_to_read(path, encoding="utf-8") as file:
            value = parse_json(file.read())
        if not isinstance(value, dict):
            raise ValueError(f"it holds a {type(value).__name__}")
        return value
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"{path} is not a JSON object ({reason}); correct or restore it."
        ) from error


def copy_file(source: str, target: str) -> None:
    """Copies a file or an object as a whole, with the permissions of a new file."""
    with open_to_read(source, "rb") as read, atomic_file(target, binary=True) as file:
        shutil.copyfileobj(read, file)


def user_cache_dir(name: str) -> str:
    """Returns the user's folder for the cache `name` of the library, which may not exist yet."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(folder, "moelib", name)


# -- Objects that grow -----------------------------------------------------------------------------


class GrowingObject(io.RawIOBase):
    """An object that grows: held in memory, and uploaded as a whole by a thread.

    A write starts an upload if the last one began a minute ago, `flush_soon` once that has ended. A
    failure is raised by the next write, and closing uploads the rest: a process that is killed
    loses what it wrote since the last upload.
    """

    def __init__(self, path: str) -> None:
        """Reads the object, if it exists. Raises OSError."""
        self._path, self._data = path, bytearray()
        with contextlib.suppress(FileNotFoundError):
            self._data += read_bytes(path)
        self._num_uploaded = len(self._data)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "upload")
        # The upload that runs, and the next.
        self._uploads: list[concurrent.futures.Future[None]] = []
        self._next = time.monotonic() + _UPLOAD_SECONDS  # Time from which a write starts one.

    def writable(self) -> bool:
        """Returns True."""
        return True

    def write(self, data: Any) -> int:
        """Appends bytes; returns their number."""
        self._data += data
        if not self._unfinished() and time.monotonic() >= self._next:
            self.flush_soon()
        return len(data)

    def flush_soon(self) -> None:
        """Starts an upload, after the one that runs. Raises OSError if one before failed."""
        # One that waits uploads what is there when it begins.
        if self._unfinished() < 2 and self._num_uploaded < len(self._data):
            self._uploads.append(self._thread.submit(self._put))

    def _unfinished(self) -> int:
        """Returns the number of uploads that run or wait. Raises OSError if one before failed."""
        while self._uploads and self._uploads[0].done():
            self._uploads.pop(0).result()
        return len(self._uploads)

    def _put(self) -> None:
        """Uploads the content."""
        begin, data = time.monotonic(), bytes(self._data)
        self._next = begin + _UPLOAD_SECONDS
        write_bytes(self._path, data)
        self._num_uploaded = len(data)
        end = time.monotonic()
        self._next = max(self._next, end + (end - begin) / _UPLOAD_SHARE)

    def close(self) -> None:
        """Uploads the rest, and waits for it. Raises OSError."""
        if self.closed:
            return
        super().close()
        self._thread.shutdown()
        if self._num_uploaded < len(self._data):
            self._put()
