"""Documents in lines of JSON: plain files, .gz, or .zst."""

import contextlib
import dataclasses
import functools
import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from moelib.core.config import REQUIRED, config_class
from moelib.core.errors import UserError
from moelib.data.sources.files import EXPANSION, FileStamp, find_files, part_size
from moelib.data.sources.source import (
    BadRecordError,
    BadRecords,
    Part,
    Source,
    record_as_text,
)
from moelib.runtime.storage import readable

PACKED = ("", ".gz", ".zst", ".zstd")  # Endings of a plain file, and of compressed ones.
_CONVERSATIONS = {"messages", "conversations", "completion", "output"}  # Their fields.
ENDINGS = tuple(stem + packed for stem in (".jsonl", ".json") for packed in PACKED)


@dataclasses.dataclass(frozen=True)
class JsonLinesPart:
    """The lines that begin in a range of bytes of a file, or all lines of a compressed file."""

    file: FileStamp
    text_field: str | None
    start: int = 0
    end: int | None = None  # None: the end of the file.

    @property
    def name(self) -> str:
        """The file."""
        return self.file.path

    @property
    def num_bytes(self) -> int:
        """Bytes of the lines, estimated for a compressed file."""
        return self.file.num_text_bytes if self.end is None else self.end - self.start

    def documents(self, bad_records: BadRecords | None = None) -> Iterator[str]:
        """Yields the text field of each line; blank lines are skipped."""
        return self.records(functools.partial(text_of, field=self.text_field), bad_records)

    def records[T](
        self, read: Callable[[Mapping[str, Any]], T], bad_records: BadRecords | None = None
    ) -> Iterator[T]:
        """Yields what `read` returns of each line's object; see `RecordPart`."""
        path = self.file.path
        with readable(path), unpacking(path), open_packed(path) as file:
            for number, line in enumerate(self._lines(file), 1):
                if not line.strip():
                    continue
                try:
                    yield read(record_of(line))
                except BadRecordError as error:
                    located = error.at(f"{path}:{number + self._lines_before}")
                    if bad_records is None:
                        raise located from None
                    bad_records.add(located)

    def _lines(self, file: io.BufferedIOBase) -> Iterator[bytes]:
        """Yields the lines that begin in [start, end)."""
        position = self.start
        if self.start:
            file.seek(self.start - 1)
            position += len(file.readline()) - 1  # The rest of a line that began before.
        while (self.end is None or position < self.end) and (line := file.readline()):
            position += len(line)
            yield line
        if self.end is not None and position < self.end:
            raise UserError(
                f"{self.file.path} ends at byte {position} instead of {self.file.num_bytes}: "
                "it has been cut while it was read; restore it and run the same command again."
            )

    @functools.cached_property
    def _lines_before(self) -> int:
        """The number of lines that begin before this part."""
        count = 0
        with open(self.file.path, "rb") as file:
            while file.tell() < self.start and file.readline():
                count += 1
        return count


def record_of(line: bytes) -> Mapping[str, Any]:
    """Returns the object of a line of JSON. Raises BadRecordError if it is none."""
    line = line.strip()
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        raise BadRecordError(f"not UTF-8 ({error}); save the file as UTF-8") from None
    except (ValueError, RecursionError) as error:
        hint = " (the file seems to be an array; write one record per line)" * (line == b"[")
        raise BadRecordError(f"not JSON{hint}: {error}") from None
    if not isinstance(record, dict):
        raise BadRecordError(f"a {type(record).__name__}, not an object")
    return record


def text_of(record: Mapping[str, Any], field: str | None) -> str:
    """Returns the text field of a record, or the whole. Raises BadRecordError if it is no text."""
    name = "it" if field is None else f"field {field!r}"
    if field is None:
        text = record_as_text(record)
    elif field not in record:
        names = f"{sorted(record)}"
        chat = ", or format to chat (--format=chat)" if _CONVERSATIONS & record.keys() else ""
        raise BadRecordError(f"no {name}; it has {names:.200}: set text_field (--text_field){chat}")
    elif not isinstance(text := record[field], str):
        raise BadRecordError(f"{name} is {text!r:.40}, not text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRecordError(f"{name} has half a surrogate pair, not text") from None
    return text


@contextlib.contextmanager
def open_packed(path: str) -> Iterator[io.BufferedReader | gzip.GzipFile]:
    """Opens a plain, .gz or .zst file for reading bytes, through all members or frames.

    Raises:
        EOFError: If a compressed file has no bytes.
    """
    name = path.lower()
    is_packed = name.endswith((".gz", ".zst", ".zstd"))
    with contextlib.ExitStack() as stack:
        if is_packed:
            with open(path, "rb") as file:
                if not file.read(1):  # Which gzip takes for no text.
                    raise EOFError("it has no bytes")
        if name.endswith(".gz"):
            yield stack.enter_context(gzip.open(path, "rb"))
        elif is_packed:
            import pyarrow  # Its reader, unlike that of zstandard, detects a truncated archive.

            raw = stack.enter_context(pyarrow.input_stream(path, compression="zstd"))
            yield stack.enter_context(io.BufferedReader(raw, 1 << 20))
        else:
            yield stack.enter_context(open(path, "rb"))


@contextlib.contextmanager
def unpacking(path: str) -> Iterator[None]:
    """Names the file in errors of decompression, which have many classes."""
    try:
        yield
    except (EOFError, OSError, zlib.error) as error:
        if isinstance(error, UserError) or getattr(error, "errno", None):
            raise  # From the disk, not from the archive.
        raise UserError(
            f"{path} cannot be decompressed ({error}); fetch it again, or exclude it from paths."
        ) from error


class JsonLines(Source):
    """Lines of JSON, each a document: .jsonl or .json, plain, .gz, or .zst (as in DCLM)."""

    @config_class
    class Config(Source.Config):
        paths: Sequence[str] = REQUIRED  # Files, folders or glob patterns.
        # The field of a line that holds the document; None: the whole line.
        text_field: str | None = "text"

    def parts(self) -> Sequence[Part]:
        """Returns compressed files whole and plain files in ranges of bytes."""
        files = find_files(self.config.paths, ENDINGS)
        size, field = part_size(files), self.config.text_field
        parts: list[Part] = []
        for file in files:
            if os.path.splitext(file.path)[1].lower() in EXPANSION:
                parts.append(JsonLinesPart(file, field))
                continue
            starts = range(0, max(file.num_bytes, 1), size)
            parts += [JsonLinesPart(file, field, i, min(i + size, file.num_bytes)) for i in starts]
        return parts
