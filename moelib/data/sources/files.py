"""Text files as documents; and finding files and dividing them into parts.

A part consists of whole small files or of a piece of a large one, so that many processes share the
work whatever the sizes of files.
"""

import dataclasses
import glob
import hashlib
import io
import os
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence

from moelib.core.config import REQUIRED, config_class
from moelib.core.config_types import PositiveInt
from moelib.core.errors import MissingFileError, UserError
from moelib.data.sources.source import BadRecords, Part, Source
from moelib.runtime.storage import readable

# Bytes of text per part: enough to keep a worker busy, few enough to divide the work evenly.
_MIN_PART_BYTES = 1 << 19
_MAX_PART_BYTES = 1 << 28
_PARTS_PER_SOURCE = 64

# Size of text relative to its file, for estimates.
EXPANSION = {".gz": 4, ".zst": 5, ".zstd": 5, ".parquet": 3}

# Length from which on a document is divided: encoding takes 200 bytes of memory per character.
MAX_DOCUMENT_CHARS = 1 << 22

_NUM_SAMPLES = 1000  # Files of which a part is read for the fingerprint of a corpus.
_SAMPLE_BYTES = 1 << 16

STORE_MARK = "moelib_prepare.json"  # In every token store; a folder with it holds no text.


@dataclasses.dataclass(frozen=True)
class FileStamp:
    """A file as the source listed it; a copy of it is equal."""

    path: str = dataclasses.field(compare=False)
    name: str  # Relative to the folder of all files that one path names.
    num_bytes: int
    modified_ns: int = dataclasses.field(compare=False)
    sample: str = ""  # Hash of its first and last bytes; "" for most of many files.

    @property
    def num_text_bytes(self) -> int:
        """Bytes of the decompressed text, estimated."""
        return self.num_bytes * EXPANSION.get(os.path.splitext(self.path)[1].lower(), 1)


def find_files(paths: Sequence[str], endings: tuple[str, ...]) -> list[FileStamp]:
    """Returns the files that paths name, each once, in the order of `paths` and sorted within each.

    Args:
        paths: Files, glob patterns (`**` for any depth), or folders, which are searched at any
            depth.
        endings: Endings of the names of the files that are taken from a folder.

    Raises:
        MissingFileError: If a path matches no file.
        UserError: If no path is given.
    """
    if not paths:
        raise UserError("No paths are given; set paths to files, folders or glob patterns.")
    found: dict[str, FileStamp] = {}
    for path in paths:
        wanted = ""
        if os.path.isdir(path):
            matches = walk_files(path, endings)
            wanted = f" with files ending in {', '.join(endings)}"
        else:
            matches = [path] if os.path.isfile(path) else glob.glob(path, recursive=True)
        names = sorted(filter(os.path.isfile, matches))
        if not names:
            raise MissingFileError(
                f"{path} matches no file; set paths to a file, a folder{wanted} or a pattern."
            )
        for file in stamps(names):
            found.setdefault(os.path.abspath(file.path), file)
    return list(found.values())


def walk_files(folder: str, endings: tuple[str, ...]) -> Iterator[str]:
    """Yields the files of a folder, at any depth, with these endings in any case.

    Links are followed, to each folder once; token stores are skipped.
    """
    seen, endings = set[str](), tuple(ending.lower() for ending in endings)
    for parent, folders, names in os.walk(folder, onerror=_raise, followlinks=True):
        folders.sort()  # Of two names of a folder, the first counts on every machine.
        if STORE_MARK in names or (real := os.path.realpath(parent)) in seen:
            folders.clear()
            continue
        seen.add(real)
        yield from (os.path.join(parent, n) for n in names if n.lower().endswith(endings))


def _raise(error: OSError) -> None:
    raise UserError(
        f"{error.filename} cannot be listed: {error.strerror}; correct its permissions, or set "
        "paths to patterns that exclude it."
    ) from error


def stamps(paths: Sequence[str]) -> list[FileStamp]:
    """Returns the stamps of files, with samples of a thousand of them."""
    root = os.path.commonpath([os.path.dirname(path) for path in paths])
    every = -(-len(paths) // _NUM_SAMPLES)
    return [
        FileStamp(
            path,
            os.path.relpath(path, root),
            *_size_and_time(path),
            _sample(path) if i % every == 0 else "",
        )
        for i, path in enumerate(paths)
    ]


def _sample(path: str) -> str:
    """Returns a hash of the first and last 64 KiB of a file."""
    digest = hashlib.sha256()
    with readable(path), open(path, "rb") as file:
        digest.update(file.read(_SAMPLE_BYTES))
        file.seek(max(file.tell(), os.fstat(file.fileno()).st_size - _SAMPLE_BYTES))
        digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _size_and_time(path: str) -> tuple[int, int]:
    with readable(path):
        info = os.stat(path)
    return info.st_size, info.st_mtime_ns


def files_of(part: Part) -> list[FileStamp]:
    """Returns the stamps of the files that a part is read from."""
    values = [getattr(part, field.name) for field in dataclasses.fields(part)]
    files = [file for x in values for file in (x if isinstance(x, tuple) else (x,))]
    return [file for file in files if isinstance(file, FileStamp)]


def check_unchanged(part: Part) -> None:
    """Raises UserError if a file of a part differs in size or time from that of its listing."""
    for file in files_of(part):
        if _size_and_time(file.path) != (file.num_bytes, file.modified_ns):
            raise UserError(
                f"{file.path} was written to while it was read; run the same command again once "
                "the file is complete."
            )


def part_size(files: Sequence[FileStamp]) -> int:
    """Returns the bytes of text that a part of these files should hold."""
    total = sum(file.num_text_bytes for file in files)
    return min(max(total // _PARTS_PER_SOURCE, _MIN_PART_BYTES), _MAX_PART_BYTES)


def group_files(files: Sequence[FileStamp]) -> list[tuple[FileStamp, ...]]:
    """Returns groups of consecutive files, each of about `part_size` bytes or of one file."""
    most = part_size(files)
    groups: list[list[FileStamp]] = []
    size = 0
    for file in files:
        if not groups or size + file.num_text_bytes > most:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.num_text_bytes
    return [tuple(group) for group in groups]


# -- Text ----------------------------------------------------------------------------------------


def _decode_utf8(path: str, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}; convert the "
            "file, or exclude it from paths."
        ) from None


def _decode_python(data: bytes) -> str:
    """Decodes with the encoding that the file declares (PEP 263), or else as Latin-1."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return data.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError):
        return data.decode("latin-1")


@dataclasses.dataclass(frozen=True)
class TextFilesPart:
    """Files, each of which is a document or several."""

    files: tuple[FileStamp, ...]
    encoding: str = "utf-8"  # Or "python": the encoding that a source file declares.
    max_document_chars: int | None = None  # Longer texts are divided.

    @property
    def name(self) -> str:
        """The first file, and the number of others."""
        more = len(self.files) - 1
        return self.files[0].path + (f" and {more} more" if more else "")

    @property
    def num_bytes(self) -> int:
        """Bytes of the files."""
        return sum(file.num_bytes for file in self.files)

    def documents(self, bad_records: BadRecords | None = None) -> Iterator[str]:
        """Yields the text of each file, with its line ends, in pieces if it is too long."""
        del bad_records
        for file in self.files:
            with readable(file.path), open(file.path, "rb") as opened:
                data = opened.read()
            python = self.encoding == "python"
            text = _decode_python(data) if python else _decode_utf8(file.path, data)
            yield from text_pieces(text, self.max_document_chars or len(text))


def text_pieces(text: str, most: int | None = None) -> Iterator[str]:
    """Yields a text in pieces of at most `most` characters, divided after line ends if possible.

    By default, pieces have at most `MAX_DOCUMENT_CHARS`.
    """
    start, most = 0, most or MAX_DOCUMENT_CHARS
    while len(text) - start > most:
        end = text.rfind("\n", start, start + most) + 1 or start + most
        yield text[start:end]
        start = end
    yield text[start:]


class TextFiles(Source):
    """UTF-8 text files, each a document; from a folder, those with `endings`.

    A split of a token store consists of whole documents, so a corpus of a few large files needs
    `max_document_chars`.
    """

    @config_class
    class Config(Source.Config):
        paths: Sequence[str] = REQUIRED  # Files, folders or glob patterns.
        endings: Sequence[str] = (".txt", ".md", ".rst")  # Of files in a folder.
        # Longer files are divided after a line's end.
        max_document_chars: PositiveInt | None = None

    def parts(self) -> Sequence[Part]:
        """Returns the files in groups."""
        cfg = self.config
        files = find_files(cfg.paths, tuple(cfg.endings))
        return [TextFilesPart(g, "utf-8", cfg.max_document_chars) for g in group_files(files)]


class PythonSourceCode(Source):
    """The sources of Python's standard library on this machine: text that is always available.

    A document is a file. Installed packages and caches are excluded. With the library's tests,
    where they are installed, it is some 30 MB.
    """

    @config_class
    class Config(Source.Config):
        path: str | None = None  # Folder of the library; None: that of the running interpreter.

    def parts(self) -> Sequence[Part]:
        """Returns the .py files in groups. Raises MissingFileError if there are none."""
        root = self.config.path or sysconfig.get_path("stdlib")
        excluded = {"site-packages", "dist-packages", "__pycache__"}
        paths: list[str] = []
        for parent, folders, names in os.walk(root, onerror=_raise):
            folders[:] = sorted(set(folders) - excluded)
            paths += [os.path.join(parent, n) for n in sorted(names) if n.endswith(".py")]
        if not paths:
            raise MissingFileError(
                f"{root} has no Python sources; set path to a folder that has some, or use "
                "TextFiles."
            )
        return [TextFilesPart(group, "python") for group in group_files(stamps(paths))]
