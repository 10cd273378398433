"""Documents in the rows of CSV and TSV files, plain, .gz or .zst."""

import csv
import dataclasses
import io
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from moelib.core.config import REQUIRED, config_class
from moelib.core.errors import UserError
from moelib.data.sources.files import FileStamp, find_files
from moelib.data.sources.json_lines import PACKED, open_packed, unpacking
from moelib.data.sources.source import (
    BadRecordError,
    BadRecords,
    Part,
    Source,
    record_as_text,
)
from moelib.runtime.storage import readable

DELIMITERS = {".csv": ",", ".tsv": "\t"}
ENDINGS = tuple(stem + packed for stem in DELIMITERS for packed in PACKED)

_MAX_BAD_LINES = 10  # Longer rows with a wrong quote hold rows that would be lost with them.
_MAX_FIELD_CHARS = 1 << 31 if sys.maxsize > 1 << 32 else sys.maxsize  # Of the module csv: 128 KiB.


@dataclasses.dataclass(frozen=True)
class DelimitedPart:
    """All rows of a file: a row may have several lines, so that no line tells where one begins."""

    file: FileStamp
    column: str | None
    delimiter: str

    @property
    def name(self) -> str:
        """The file."""
        return self.file.path

    @property
    def num_bytes(self) -> int:
        """Bytes of the text, estimated for a compressed file."""
        return self.file.num_text_bytes

    def documents(self, bad_records: BadRecords | None = None) -> Iterator[str]:
        """Yields the values of the column; a row with fewer fields or more is a bad record."""
        column = self.column
        read = record_as_text if column is None else lambda record: record[column]
        return self.records(read, bad_records)

    def records[T](
        self, read: Callable[[Mapping[str, Any]], T], bad_records: BadRecords | None = None
    ) -> Iterator[T]:
        """Yields what `read` returns of each row; see `RecordPart`."""
        path = self.file.path
        with readable(path), unpacking(path), open_packed(path) as file:
            # Bytes that are no UTF-8 become half surrogates, which make their row a bad record.
            lines = io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="")
            csv.field_size_limit(_MAX_FIELD_CHARS)
            quoting = csv.QUOTE_NONE if self.delimiter == "\t" else csv.QUOTE_MINIMAL
            rows = csv.reader(lines, delimiter=self.delimiter, quoting=quoting, strict=True)
            header: list[str] = []
            while True:
                before = rows.line_num
                try:
                    row = next(rows, None)
                    if row is None:
                        return
                    if not row:  # A blank line is no row.
                        continue
                    if header:
                        yield read(_record_of(row, header))
                    else:
                        header = self._header(row)
                except (csv.Error, BadRecordError) as error:
                    first, last = before + 1, rows.line_num
                    which = f" (lines {first} to {last} are one row)" if last > first else ""
                    located = BadRecordError(f"{error}{which}").at(f"{path}:{last}")
                    if isinstance(error, BadRecordError):
                        located = located.because(error.reason)
                    elif last - first >= _MAX_BAD_LINES:
                        raise UserError(f"{located}; close the quote of line {first}.") from None
                    if bad_records is None or not header:  # Else a row would be the header.
                        raise located from None
                    bad_records.add(located)

    def _header(self, row: list[str]) -> list[str]:
        """Returns the first row, whose names are unique. Raises UserError or BadRecordError."""
        _check_text(row)
        for column in row if self.column is None else [self.column]:
            if row.count(column) != 1:
                raise UserError(
                    f"{self.file.path}: {row.count(column)} columns are named {column!r} in its "
                    f"first row, {row!s:.200}; set column (--text_field) to one."
                )
        return row


def _record_of(row: Sequence[str], header: Sequence[str]) -> dict[str, str]:
    if len(row) != len(header):
        hint = "; a .tsv has no quotes, but a .csv may" * any(x.startswith('"') for x in row)
        raise BadRecordError(f"{len(row)} fields, and the header has {len(header)}{hint}")
    _check_text(row)
    return dict(zip(header, row, strict=True))


def _check_text(row: Sequence[str]) -> None:
    try:
        "".join(row).encode()
    except UnicodeEncodeError:
        raise BadRecordError("not UTF-8") from None


class Delimited(Source):
    """Rows of .csv or .tsv files, of which the first names the columns.

    A field of a .csv may be quoted by `"`, and then has delimiters and line ends, and quotes as
    `""` (RFC 4180). In a .tsv quotes are text, and a line is a row (IANA's
    text/tab-separated-values).
    """

    @config_class
    class Config(Source.Config):
        paths: Sequence[str] = REQUIRED  # Files, folders or glob patterns.
        column: str | None = "text"  # The column that holds the document; None: the whole row.

    def parts(self) -> Sequence[Part]:
        """Returns the files; a large corpus should have many."""
        return [
            DelimitedPart(file, self.config.column, _delimiter(file.path))
            for file in find_files(self.config.paths, ENDINGS)
        ]


def _delimiter(path: str) -> str:
    """Returns what separates the fields, by the ending of a file."""
    for ending, delimiter in DELIMITERS.items():
        if path.lower().endswith(tuple(ending + packed for packed in PACKED)):
            return delimiter
    raise UserError(f"{path}: the name of a table ends in {', '.join(ENDINGS)}; rename it.")
