"""Folders of safetensors files in Hugging Face's layout: tensors by name, in one file or many.

A folder has either `model.safetensors`, or several files and `model.safetensors.index.json`, which
maps each tensor to its file. Folders written here also have `SHA256SUMS`; where that file exists,
reading compares the tensors' files, and the others that it lists, with it.
"""

import concurrent.futures
import contextlib
import errno
import glob
import hashlib
import json
import logging
import os
import re
import threading
from collections.abc import Collection, Iterable
from typing import Any

import ml_dtypes
import numpy as np

from moelib.core.config_types import shortened
from moelib.core.errors import ExistingFileError, MissingFileError, UserError
from moelib.runtime import storage
from moelib.runtime.storage import atomic_file, read_json, write_json, writing

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = SINGLE_FILE + ".index.json"
SUMS_FILE = "SHA256SUMS"
_READ = (".json", ".jinja", ".safetensors")  # Files that a model is read from.
_DESCRIBING = ("config.json", "tokenizer.json")  # Files that change the model's output too.

_DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL")
_SUM = re.compile(r"([0-9a-fA-F]{64})[ \t]+\*?(.+)")  # A line of SHA256SUMS.
# Dtypes for which the library has no NumPy equivalent.
_FLOAT8 = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E8M0": ml_dtypes.float8_e8m0fnu}


def check_tensors(folder: str) -> None:
    """Raises MissingFileError if a folder has no tensors; nothing is read."""
    if any(os.path.isfile(os.path.join(folder, name)) for name in (SINGLE_FILE, INDEX_FILE)):
        return
    pickled = glob.glob(os.path.join(glob.escape(folder), "*.bin"))
    raise MissingFileError(
        f"There is no file {os.path.join(folder, SINGLE_FILE)}, nor {INDEX_FILE}; "
        + ("save the pickled model (*.bin) as safetensors." if pickled else "name another folder.")
    )


class DamagedTensorsError(UserError, RuntimeError):
    """A file of tensors, or one that belongs to them, is not as it was written."""


class TensorFolder:
    """The tensors of a folder, each read on request.

    Use it in a `with`: at its end, the comparison of files with known checksums has finished.
    """

    def __init__(self, folder: str) -> None:
        """Opens the folder.

        Raises:
            MissingFileError: If it has no tensors, or lacks a file that its index names.
            DamagedTensorsError: If a file is not a safetensors file, is truncated, or lacks a
                tensor that the index lists.
        """
        storage.require_local("the folder of tensors", folder, "copy the model there first")
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        check_tensors(folder)
        named = _index(folder)
        if named and os.path.exists(os.path.join(folder, SINGLE_FILE)):
            raise DamagedTensorsError(
                f"{folder} has {SINGLE_FILE} and {INDEX_FILE}; remove one of them."
            )
        for name in sorted(set(named.values())) if named else [SINGLE_FILE]:
            self._open(name)
        for key, name in named.items():
            if self._file_of.get(key) != name:
                raise DamagedTensorsError(f"{os.path.join(folder, name)} has no {key}.")
        sums = _read_sums(folder)
        others = {n for n in _DESCRIBING if os.path.exists(os.path.join(folder, n))}
        if sums and (unlisted := sorted((self._files.keys() | others) - sums.keys())):
            logger.warning(
                "%s has no checksum of %s: changes of these files cannot be found.",
                os.path.join(folder, SUMS_FILE),
                ", ".join(unlisted),
            )
        self._stop = threading.Event()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "checksums")
        self._checked = self._thread.submit(self._check_sums, sums)

    def _open(self, name: str) -> None:
        import safetensors

        path = os.path.join(self.folder, name)
        if not os.path.isfile(path):
            raise MissingFileError(
                f"There is no file {path}, which {INDEX_FILE} names; restore it."
            )
        try:
            file = safetensors.safe_open(path, framework="np")
        except Exception as error:  # The library's own class, or OSError.
            raise DamagedTensorsError(
                f"{path} is not a complete safetensors file ({error}); copy it again."
            ) from error
        self._files[name] = file
        for key in file.keys():  # noqa: SIM118, it is not a dict.
            if key in self._file_of:
                raise DamagedTensorsError(f"{path} has {key}, as has {self._file_of[key]}.")
            self._file_of[key] = name

    def _check_sums(self, sums: dict[str, str]) -> None:
        """Compares the opened files, and the others that a model is read from, with their sums."""
        for name, wanted in sums.items():
            if not (name in self._files or name.endswith(_READ)) or self._stop.is_set():
                continue
            check_sum(os.path.join(self.folder, name), wanted, SUMS_FILE)

    def __enter__(self) -> "TensorFolder":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._stop.set()
        self._thread.shutdown(wait=kind is None)
        self._files.clear()
        if kind is None:
            self._checked.result()

    def keys(self) -> Collection[str]:
        """Returns the names of all tensors."""
        return self._file_of.keys()

    def shape(self, key: str) -> tuple[int, ...]:
        """Returns the shape of a tensor."""
        return tuple(self._files[self._file_of[key]].get_slice(key).get_shape())

    def read(self, key: str) -> np.ndarray:
        """Returns a tensor. Raises UserError if its dtype is not supported."""
        file, path = self._files[self._file_of[key]], os.path.join(self.folder, self._file_of[key])
        dtype = file.get_slice(key).get_dtype()
        if dtype in _FLOAT8:
            return _read_float8(path, key, _FLOAT8[dtype])
        if dtype not in _DTYPES:
            raise UserError(
                f"{path}: {key} is of dtype {dtype}; moelib reads "
                f"{', '.join((*_DTYPES, *_FLOAT8))}. Convert it to BF16 first."
            )
        return file.get_tensor(key)


def _read_float8(path: str, key: str, dtype: Any) -> np.ndarray:
    """Returns a tensor of a dtype of 8 bits."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))[key]
        begin, end = header["data_offsets"]
        file.seek(8 + size + begin)
        values = np.frombuffer(file.read(end - begin), dtype)
    return values.reshape(header["shape"])


def _index(folder: str) -> dict[str, str]:
    """Returns the file of each tensor; empty if there is no index."""
    path = os.path.join(folder, INDEX_FILE)
    if not os.path.exists(path):
        return {}
    named = read_json(path).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise DamagedTensorsError(f"{path} is not an index of tensors: it has no weight_map.")
    for key, name in named.items():
        if not isinstance(name, str) or not _is_inside(name):
            raise DamagedTensorsError(
                f"{path}: weight_map has {shortened(name)} for {key}; it must be the name of a "
                "file in this folder."
            )
    return named


def _is_inside(name: str) -> bool:
    """Returns whether the path of a file stays in its folder; the file may be a link."""
    return (
        os.path.basename(name) not in ("", ".")
        and not os.path.isabs(name)
        and ".." not in name.split("/")
        and "\0" not in name
    )


def _sha256(path: str) -> str:
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(errno.EINVAL, "it is not a regular file", path)
    with storage.open_to_read(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_sums(folder: str) -> dict[str, str]:
    """Returns {file: SHA-256}; empty if there is no SHA256SUMS."""
    path = os.path.join(folder, SUMS_FILE)
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            found = [_SUM.fullmatch(line.strip()) for line in file if line.strip()]
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise DamagedTensorsError(f"{path} cannot be read: {error.strerror}.") from error
    sums = {os.path.normpath(each[2]): each[1].lower() for each in found if each}
    if len(sums) != len(found) or not all(map(_is_inside, sums)):
        raise DamagedTensorsError(
            f"{path}: each line must be a checksum and the name of another file in this folder."
        )
    return sums


def check_sum(path: str, wanted: str, source: str, *, cure: str = "restore the file") -> None:
    """Raises DamagedTensorsError unless a file has the SHA-256 that `source` has of it."""
    try:
        found = _sha256(path)
    except OSError as error:
        raise DamagedTensorsError(
            f"{path} cannot be read ({error.strerror}), but {source} lists it; {cure}."
        ) from error
    if found != wanted:
        raise DamagedTensorsError(
            f"{path} has changed since it was written: its SHA-256 differs from that in {source}; "
            f"{cure}."
        )


def file_sums(folder: str, names: Iterable[str]) -> dict[str, str]:
    """Returns {name: SHA-256} of those files of a folder that exist."""
    paths = {name: os.path.join(folder, name) for name in names}
    return {name: _sha256(path) for name, path in paths.items() if storage.exists(path)}


def add_sums(folder: str, names: Iterable[str]) -> None:
    """Adds the checksums of those files that exist to SHA256SUMS, or replaces them."""
    sums = _read_sums(folder) | file_sums(folder, names)
    with atomic_file(os.path.join(folder, SUMS_FILE)) as file:
        file.writelines(f"{digest}  {name}\n" for name, digest in sums.items())


def write_tensors(
    folder: str, tensors: Iterable[tuple[str, np.ndarray]], *, max_file_bytes: int = 2 << 30
) -> list[str]:
    """Writes tensors to files, whose names it returns.

    A file has at most `max_file_bytes`, or one larger tensor. Memory holds one file at a time.

    Raises:
        ExistingFileError: If the folder has tensors.
    """
    storage.require_local("the folder of tensors", folder, "copy it to the store")
    os.makedirs(folder, exist_ok=True)
    for name in (SINGLE_FILE, INDEX_FILE):
        if os.path.exists(os.path.join(folder, name)):
            raise ExistingFileError(f"{folder} has a {name}; choose another folder.")
    parts: list[list[str]] = []  # The tensors of each file.
    held: dict[str, np.ndarray] = {}
    total = num_held = 0

    def flush() -> None:
        _save(held, _part_path(folder, len(parts)))
        parts.append(list(held))
        held.clear()

    for key, values in tensors:
        if held and num_held + values.nbytes > max_file_bytes:
            flush()
            num_held = 0
        held[key] = values
        num_held += values.nbytes
        total += values.nbytes
    flush()
    names = [SINGLE_FILE]
    if len(parts) > 1:
        names = [f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
        file_of = {key: name for name, keys in zip(names, parts, strict=True) for key in keys}
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        write_json(os.path.join(folder, INDEX_FILE), index)
    with contextlib.suppress(FileNotFoundError):
        os.remove(os.path.join(folder, SUMS_FILE))  # Of files that are gone.
    for i, name in enumerate(names):
        os.replace(_part_path(folder, i), os.path.join(folder, name))
    add_sums(folder, [*names, INDEX_FILE])
    return names


def _part_path(folder: str, i: int) -> str:
    return os.path.join(folder, f"model-{i + 1:05d}.safetensors.part")


def _save(tensors: dict[str, np.ndarray], path: str) -> None:
    """Writes a file with the usual permissions; the library's are for the owner alone."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    with open(path, "wb") as file:
        mode = os.fstat(file.fileno()).st_mode
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # The library's, for errors of the system too.
        os.unlink(path)
        raise UserError(f"{path} cannot be written: {error}; free some space.") from error
    os.chmod(path, mode)
    with writing(path), open(path, "rb") as file:
        os.fsync(file.fileno())
