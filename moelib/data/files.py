"""Documents in files: one a text file, one a line of JSON, one a row of Parquet.

Parts are made of whole small files, or of byte ranges or row groups of large ones, so that many
processes share the work whatever the files' sizes.
"""

import contextlib
import dataclasses
import glob
import gzip
import io
import json
import os
import sysconfig
import tokenize
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from moelib.core.config import REQUIRED, config_class
from moelib.data.source import BadRecordError, BadRecords, Part, Source

# Text in a part: enough to keep a worker busy for a while, little enough to share evenly.
_MIN_PART_BYTES = 1 << 19
_MAX_PART_BYTES = 1 << 28
_PARTS_PER_SOURCE = 64

# How much larger text is than its file, for estimates.
_EXPANSION = {".gz": 4, ".zst": 5, ".zstd": 5, ".parquet": 3}

_JSON_ENDINGS = tuple(
    stem + packed for stem in (".jsonl", ".json") for packed in ("", ".gz", ".zst", ".zstd")
)


@dataclasses.dataclass(frozen=True)
class FileStamp:
    """A file as it was when the source listed it."""

    path: str
    num_bytes: int
    modified_ns: int

    @property
    def num_text_bytes(self) -> int:
        """Estimated bytes once unpacked."""
        return self.num_bytes * _EXPANSION.get(os.path.splitext(self.path)[1], 1)


def find_files(paths: Sequence[str], endings: tuple[str, ...]) -> list[FileStamp]:
    """Returns the files that paths name, in the order of paths and sorted within each.

    Args:
        paths: Files, glob patterns (`**` for any depth), or folders, which are searched through.
        endings: What a file's name must end with to be taken from a folder.

    Raises:
        FileNotFoundError: If a path matches no file.
        ValueError: If no path is given.
    """
    if not paths:
        raise ValueError("No paths are given; set paths to files, folders or glob patterns.")
    found: dict[str, None] = {}
    for path in paths:
        if os.path.isdir(path):
            walk = sorted(_walk(path, endings))
        elif os.path.isfile(path):
            walk = [path]
        else:
            walk = sorted(p for p in glob.glob(path, recursive=True) if os.path.isfile(p))
        if not walk:
            wanted = f" with files ending in {', '.join(endings)}" if os.path.isdir(path) else ""
            raise FileNotFoundError(
                f"{path} matches no file; set paths to a file, a folder{wanted} or a pattern."
            )
        found |= dict.fromkeys(walk)
    return [_stamp(path) for path in found]


def _walk(folder: str, endings: tuple[str, ...]) -> Iterator[str]:
    for parent, _, names in os.walk(folder):
        yield from (os.path.join(parent, name) for name in names if name.endswith(endings))


def _stamp(path: str) -> FileStamp:
    info = os.stat(path)
    return FileStamp(path, info.st_size, info.st_mtime_ns)


def part_size(files: Sequence[FileStamp]) -> int:
    """Returns the bytes of text that a part of these files should hold."""
    total = sum(file.num_text_bytes for file in files)
    return min(max(total // _PARTS_PER_SOURCE, _MIN_PART_BYTES), _MAX_PART_BYTES)


def group_files(files: Sequence[FileStamp], num_bytes: int) -> list[tuple[FileStamp, ...]]:
    """Returns the files in groups of consecutive ones, each some `num_bytes` or a single file."""
    groups: list[tuple[FileStamp, ...]] = []
    group: list[FileStamp] = []
    size = 0
    for file in files:
        if group and size + file.num_text_bytes > num_bytes:
            groups.append(tuple(group))
            group, size = [], 0
        group.append(file)
        size += file.num_text_bytes
    return [*groups, tuple(group)]


# -- Text ----------------------------------------------------------------------------------------


def _decode_utf8(path: str, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}; convert the "
            "file, or leave it out of paths."
        ) from None


def _decode_python(path: str, data: bytes) -> str:
    """Decodes as the file itself says (PEP 263), and as Latin-1, which takes all, if it lies."""
    del path
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return data.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError):
        return data.decode("latin-1")


@dataclasses.dataclass(frozen=True)
class TextFilesPart:
    """Files that are a document each."""

    files: tuple[FileStamp, ...]
    encoding: str = "utf-8"  # Or "python": what the source file declares.

    @property
    def name(self) -> str:
        """The first file, and how many follow."""
        more = len(self.files) - 1
        return self.files[0].path + (f" and {more} more" if more else "")

    @property
    def num_bytes(self) -> int:
        """Bytes of the files."""
        return sum(file.num_bytes for file in self.files)

    def documents(self, bad_records: BadRecords | None = None) -> Iterator[str]:
        """Yields each file's text, line ends as they are in the file."""
        del bad_records
        decode: Callable[[str, bytes], str] = (
            _decode_python if self.encoding == "python" else _decode_utf8
        )
        for file in self.files:
            with open(file.path, "rb") as opened:
                yield decode(file.path, opened.read())


class TextFiles(Source):
    """Text files, a document each; from a folder, those ending in `endings`."""

    @config_class
    class Config(Source.Config):
        """Config of `TextFiles`."""

        paths: Sequence[str] = REQUIRED  # Files, folders or glob patterns.
        endings: Sequence[str] = (".txt", ".md", ".rst")

    def parts(self) -> Sequence[Part]:
        """Returns the files in groups."""
        files = find_files(self.config.paths, tuple(self.config.endings))
        return [TextFilesPart(group) for group in group_files(files, part_size(files))]


class PythonSourceCode(Source):
    """The Python standard library's own sources on this machine: text that is always there.

    A document is a file. Installed packages and caches are left out; the library's tests, where
    the installation has them, are most of the volume: some 30 MB in all.
    """

    @config_class
    class Config(Source.Config):
        """Config of `PythonSourceCode`."""

        path: str | None = None  # The library's folder; None asks the running interpreter.

    def parts(self) -> Sequence[Part]:
        """Returns the .py files in groups. Raises FileNotFoundError if there are none."""
        root = self.config.path or sysconfig.get_path("stdlib")
        left_out = {"site-packages", "dist-packages", "__pycache__"}
        files = []
        for parent, folders, names in os.walk(root):
            folders[:] = sorted(set(folders) - left_out)
            files += [os.path.join(parent, name) for name in sorted(names) if name.endswith(".py")]
        if not files:
            raise FileNotFoundError(
                f"{root} has no Python sources; set path to a folder that has, or use TextFiles."
            )
        stamps = [_stamp(path) for path in files]
        return [TextFilesPart(group, "python") for group in group_files(stamps, part_size(stamps))]


# -- JSON lines ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class JsonLinesPart:
    """The lines of a file that begin between two bytes of it, or all lines of a packed file."""

    file: FileStamp
    text_field: str
    start: int = 0
    end: int | None = None  # None reads to the end of the file.

    @property
    def name(self) -> str:
        """The file."""
        return self.file.path

    @property
    def num_bytes(self) -> int:
        """Estimated bytes of the lines."""
        return self.file.num_text_bytes if self.end is None else self.end - self.start

    def documents(self, bad_records: BadRecords | None = None) -> Iterator[str]:
        """Yields the text field of each line; blank lines are no records."""
        with open_packed(self.file.path) as file:
            for number, line in enumerate(self._lines(file), 1):
                if not line.strip():
                    continue
                try:
                    yield _text_of(line, self.text_field)
                except BadRecordError as error:
                    place = f"{self.file.path}:{self._lines_before() + number}"
                    wrapped = BadRecordError(f"{place}: {error}")
                    if bad_records is None:
                        raise wrapped from None
                    bad_records.add(wrapped)

    def _lines(self, file: io.BufferedIOBase) -> Iterator[bytes]:
        """Yields the lines that begin in [start, end)."""
        position = self.start
        if self.start:
            file.seek(self.start - 1)
            position += len(file.readline()) - 1  # The rest of a line that began before.
        try:
            for line in file:
                if self.end is not None and position >= self.end:
                    return
                position += len(line)
                yield line
        except (EOFError, gzip.BadGzipFile, zlib.error, *_zstd_errors()) as error:
            raise ValueError(
                f"{self.file.path} cannot be unpacked ({error}); fetch it again, or leave it out "
                "of paths."
            ) from error

    def _lines_before(self) -> int:
        """Returns how many lines begin before this part's first."""
        if not self.start:
            return 0
        with open(self.file.path, "rb") as file:
            count, left = 0, self.start
            while left and (block := file.read(min(left, 1 << 20))):
                count += block.count(b"\n")
                left -= len(block)
            file.seek(self.start - 1)
            return count + (file.read(1) != b"\n")


def _text_of(line: bytes, field: str) -> str:
    """Returns the text field of a line of JSON. Raises BadRecordError if there is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        hint = " (the file is an array; write a record a line)" if line.strip() == b"[" else ""
        raise BadRecordError(f"not JSON{hint}: {error}") from None
    if not isinstance(record, dict):
        raise BadRecordError(f"a {type(record).__name__}, not an object with a field {field!r}")
    if field not in record:
        raise BadRecordError(f"no field {field!r}; it has {sorted(record)}: set text_field")
    if not isinstance(text := record[field], str):
        raise BadRecordError(f"field {field!r} is {text!r:.40}, not text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRecordError(f"field {field!r} has half a surrogate pair, not text") from None
    return text


def _zstd_errors() -> tuple[type[Exception], ...]:
    """Returns the error class of zstandard, if a file has needed it."""
    import sys

    module = sys.modules.get("zstandard")
    return (module.ZstdError,) if module else ()


@contextlib.contextmanager
def open_packed(path: str) -> Iterator[io.BufferedIOBase]:
    """Opens a plain, .gz or .zst file for reading bytes."""
    with contextlib.ExitStack() as stack:
        if path.endswith(".gz"):
            yield stack.enter_context(gzip.open(path, "rb"))
        elif path.endswith((".zst", ".zstd")):
            import zstandard

            raw = stack.enter_context(open(path, "rb"))
            reader = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
            yield stack.enter_context(io.BufferedReader(reader, 1 << 20))  # type: ignore[type-var]
        else:
            yield stack.enter_context(open(path, "rb"))


class JsonLines(Source):
    """Lines of JSON, a document each: .jsonl or .json, plain, .gz or .zst (as DCLM ships them)."""

    @config_class
    class Config(Source.Config):
        """Config of `JsonLines`."""

        paths: Sequence[str] = REQUIRED  # Files, folders or glob patterns.
        text_field: str = "text"  # The field of a line that holds the document.

    def parts(self) -> Sequence[Part]:
        """Returns packed files whole, and plain ones in ranges of bytes."""
        files = find_files(self.config.paths, _JSON_ENDINGS)
        size, field = part_size(files), self.config.text_field
        parts: list[Part] = []
        for file in files:
            if os.path.splitext(file.path)[1] in _EXPANSION:
                parts.append(JsonLinesPart(file, field))
                continue
            starts = range(0, max(file.num_bytes, 1), size)
            parts += [JsonLinesPart(file, field, i, min(i + size, file.num_bytes)) for i in starts]
        return parts


# -- Parquet -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ParquetPart:
    """Some row groups of a file."""

    file: FileStamp
    column: str
    row_groups: tuple[int, ...]
    first_row: int
    num_bytes: int

    @property
    def name(self) -> str:
        """The file."""
        return self.file.path

    def documents(self, bad_records: BadRecords | None = None) -> Iterator[str]:
        """Yields the column's values; a missing one is a bad record."""
        row = self.first_row
        with _open_parquet(self.file.path) as file:
            for batch in file.iter_batches(
                batch_size=1024, row_groups=list(self.row_groups), columns=[self.column]
            ):
                for text in batch.column(0).to_pylist():
                    row += 1
                    if isinstance(text, str):
                        yield text
                        continue
                    error = BadRecordError(
                        f"{self.file.path}, row {row}: column {self.column!r} is {text!r:.40}, "
                        "not text"
                    )
                    if bad_records is None:
                        raise error
                    bad_records.add(error)


def _open_parquet(path: str) -> Any:
    """Returns an opened file. Raises ValueError if it is not Parquet."""
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a Parquet file ({error}); set paths.") from None


class Parquet(Source):
    """Rows of Parquet files, a document each."""

    @config_class
    class Config(Source.Config):
        """Config of `Parquet`."""

        paths: Sequence[str] = REQUIRED  # Files, folders or glob patterns.
        column: str = "text"  # The column that holds the document.

    def parts(self) -> Sequence[Part]:
        """Returns row groups. Raises ValueError if a file lacks the column."""
        files = find_files(self.config.paths, (".parquet",))
        return [part for file in files for part in self._parts_of(file, part_size(files))]

    def _parts_of(self, file: FileStamp, size: int) -> Iterator[ParquetPart]:
        column = self.config.column
        with _open_parquet(file.path) as opened:
            metadata, names = opened.metadata, opened.schema_arrow.names
        if column not in names:
            raise ValueError(
                f"{file.path} has no column {column!r}; set column to one of {sorted(names)}."
            )
        groups: list[int] = []
        num_bytes = first_row = rows = 0
        for index in range(metadata.num_row_groups):
            groups.append(index)
            group = metadata.row_group(index)
            num_bytes += group.total_byte_size
            rows += group.num_rows
            if num_bytes >= size or index == metadata.num_row_groups - 1:
                yield ParquetPart(file, column, tuple(groups), first_row, num_bytes)
                groups, num_bytes, first_row = [], 0, rows


def source_for_path(path: str, *, text_field: str = "text") -> Source.Config:
    """Returns the config of a source that fits what lies at a path, judged by names of files.

    Args:
        path: A file, or a folder that holds files of one kind: JSON lines, Parquet or text.
        text_field: The field or column of a record that holds the document.

    Raises:
        FileNotFoundError: If there is no file of a known kind.
        ValueError: If a folder holds several kinds.
    """
    kinds = {
        "JSON lines": _JSON_ENDINGS,
        "Parquet": (".parquet",),
        "text": tuple(TextFiles.default_config().endings),
    }
    names = list(_walk(path, ("",))) if os.path.isdir(path) else [path]
    found = [kind for kind, ends in kinds.items() if any(name.endswith(ends) for name in names)]
    if len(found) > 1:
        raise ValueError(
            f"{path} holds files of several kinds ({', '.join(found)}); name one kind with a "
            "pattern such as folder/**/*.jsonl, or make a source of each."
        )
    if found == ["JSON lines"]:
        return JsonLines.default_config().set(paths=[path], text_field=text_field)
    if found == ["Parquet"]:
        return Parquet.default_config().set(paths=[path], column=text_field)
    if found == ["text"] or os.path.isfile(path):
        return TextFiles.default_config().set(paths=[path])
    known = ", ".join(ending for ends in kinds.values() for ending in ends)
    raise FileNotFoundError(f"{path} holds no file of a known kind; files may end in {known}.")
