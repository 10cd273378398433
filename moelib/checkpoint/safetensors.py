"""Folders of safetensors files, as Hugging Face lays them out: tensors by name, over many files.

A folder has either `model.safetensors`, or several files and `model.safetensors.index.json`, which
says in which of them each tensor is. What we write has `SHA256SUMS` beside them, and what has such
a file is checked against it when it is read.
"""

import hashlib
import json
import os
import threading
from collections.abc import Collection, Iterable
from typing import Any

import ml_dtypes
import numpy as np

from moelib.core.errors import UserError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = SINGLE_FILE + ".index.json"
SUMS_FILE = "SHA256SUMS"

# What a file may hold, and what it is in numpy.
_DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL")
_FLOAT8 = "F8_E4M3"


class DamagedTensorsError(UserError, RuntimeError):
    """A file of tensors that is not as it was written."""


class TensorFolder:
    """The tensors of a folder, read one at a time when they are asked for.

    Use it in a `with`: on leaving it, files whose checksums are known have been compared.
    """

    def __init__(self, folder: str) -> None:
        """Opens the folder.

        Raises:
            FileNotFoundError: If it has no tensors, or not all files that its index names.
            DamagedTensorsError: If a file is not a safetensors file, is cut off, or lacks a tensor
                that the index says it has.
        """
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
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
        self._sums = _Sums(folder, self._files)

    def _open(self, name: str) -> None:
        import safetensors

        path = os.path.join(self.folder, name)
        if not os.path.exists(path):
            what = f"{INDEX_FILE} names it" if name != SINGLE_FILE else f"nor {INDEX_FILE}"
            raise FileNotFoundError(f"There is no {path}; {what}.")
        try:
            file = safetensors.safe_open(path, framework="np")
        except Exception as error:  # The library's own kind, or OSError.
            raise DamagedTensorsError(f"{path} is no whole safetensors file: {error}") from error
        self._files[name] = file
        for key in file.keys():  # noqa: SIM118, it is no dict.
            if key in self._file_of:
                raise DamagedTensorsError(f"{path} has {key}, as {self._file_of[key]} has.")
            self._file_of[key] = name

    def __enter__(self) -> "TensorFolder":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._files.clear()
        self._sums.close(ignore=kind is not None)

    def keys(self) -> Collection[str]:
        """Returns the names of all tensors."""
        return self._file_of.keys()

    def shape(self, key: str) -> tuple[int, ...]:
        """Returns the shape of a tensor."""
        return tuple(self._files[self._file_of[key]].get_slice(key).get_shape())

    def read(self, key: str) -> np.ndarray:
        """Returns a tensor. Raises ValueError if it is of a dtype that moelib does not read."""
        file, path = self._files[self._file_of[key]], os.path.join(self.folder, self._file_of[key])
        dtype = file.get_slice(key).get_dtype()
        if dtype == _FLOAT8:
            return _read_float8(path, key)
        if dtype not in _DTYPES:
            raise ValueError(
                f"{path}: {key} is of dtype {dtype}; moelib reads "
                f"{', '.join((*_DTYPES, _FLOAT8))}. Convert it to BF16 first."
            )
        return file.get_tensor(key)


def _read_float8(path: str, key: str) -> np.ndarray:
    """Returns a tensor that the library of the format has no NumPy dtype for."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        about = json.loads(file.read(size))[key]
        begin, end = about["data_offsets"]
        file.seek(8 + size + begin)
        values = np.frombuffer(file.read(end - begin), ml_dtypes.float8_e4m3fn)
    return values.reshape(about["shape"])


def _index(folder: str) -> dict[str, str]:
    """Returns the file of each tensor, or nothing if there is but one file."""
    path = os.path.join(folder, INDEX_FILE)
    if not os.path.exists(path):
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            named = dict(json.load(file)["weight_map"])
        if not named:
            raise ValueError("it names no tensor")
        return named
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedTensorsError(f"{path} is no index of tensors: {error!r}.") from error


class _Sums:
    """Compares files with their checksums, beside other work."""

    def __init__(self, folder: str, names: Iterable[str]) -> None:
        self.folder = folder
        self.error: Exception | None = None
        self.stopped = threading.Event()
        sums = _read_sums(folder)
        self.names = {name: sums[name] for name in names if name in sums}
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        for name, wanted in self.names.items():
            path = os.path.join(self.folder, name)
            try:
                with open(path, "rb") as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                self.error = error
                return
            if found != wanted:
                self.error = DamagedTensorsError(
                    f"{path} has changed since it was written: its SHA-256 is not that of "
                    f"{SUMS_FILE}."
                )
                return
            if self.stopped.is_set():
                return

    def close(self, *, ignore: bool) -> None:
        """Waits. Raises what was found, unless something else has failed already."""
        if ignore:
            self.stopped.set()
            return
        self.thread.join()
        if self.error is not None:
            raise self.error


def _read_sums(folder: str) -> dict[str, str]:
    path = os.path.join(folder, SUMS_FILE)
    if not os.path.exists(path):
        return {}
    with open(path, encoding="utf-8") as file:
        pairs = [line.split(maxsplit=1) for line in file if line.strip()]
    if any(len(pair) != 2 for pair in pairs):
        raise DamagedTensorsError(f"{path} has lines that are no checksum and name; remove it.")
    return {os.path.normpath(name.strip().lstrip("*")): digest for digest, name in pairs}


def write_tensors(
    folder: str, tensors: Iterable[tuple[str, np.ndarray]], *, max_file_bytes: int = 2 << 30
) -> list[str]:
    """Writes tensors to files of at most so many bytes, unless one tensor has more.

    No more than one file's tensors are held at a time.

    Args:
        folder: Where; it is made. There must be no tensors in it.
        tensors: Names and values.
        max_file_bytes: When a new file is begun.

    Returns:
        The names of the files written.

    Raises:
        FileExistsError: If the folder has tensors.
    """
    from safetensors.numpy import save_file

    os.makedirs(folder, exist_ok=True)
    for name in (SINGLE_FILE, INDEX_FILE):
        if os.path.exists(os.path.join(folder, name)):
            raise FileExistsError(f"{folder} has a {name}; choose another folder.")
    parts: list[list[str]] = []  # The tensors of each file.
    held: dict[str, np.ndarray] = {}
    total = num_held = 0

    def flush() -> None:
        save_file(held, _numbered(folder, len(parts)), metadata={"format": "pt"})
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
        of = {key: name for name, keys in zip(names, parts, strict=True) for key in keys}
        _write_json(folder, INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": of})
    with open(os.path.join(folder, SUMS_FILE), "w", encoding="utf-8") as sums:
        for i, name in enumerate(names):
            path = os.path.join(folder, name)
            os.replace(_numbered(folder, i), path)
            with open(path, "rb") as file:
                sums.write(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n")
    return names


def _numbered(folder: str, i: int) -> str:
    return os.path.join(folder, f"model-{i + 1:05d}.safetensors.part")


def _write_json(folder: str, name: str, content: Any) -> None:
    with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
