"""Documents in the rows of Parquet files, and of Arrow files as `datasets` saves them."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from moelib.core.config import REQUIRED, config_class
from moelib.core.errors import UserError
from moelib.data.sources.files import FileStamp, find_files, part_size
from moelib.data.sources.source import (
    BadRecordError,
    BadRecords,
    Part,
    Source,
    record_as_text,
)
from moelib.runtime.storage import readable

PARQUET, ARROW = ".parquet", ".arrow"

_BUFFER_BYTES = 1 << 20  # Of a column that is read; without a limit, the whole of it.
_BATCH_ROWS = 64  # Documents that are decompressed at a time; they may be long.


@dataclasses.dataclass(frozen=True)
class TablePart:
    """Some row groups of a Parquet file, or record batches of an Arrow file."""

    file: FileStamp
    column: str | None
    groups: tuple[int, ...]  # Ascending, without a gap.
    first_row: int
    num_bytes: int

    @property
    def name(self) -> str:
        """The file."""
        return self.file.path

    def documents(self, bad_records: BadRecords | None = None) -> Iterator[str]:
        """Yields the values of the column; a value that is not text is a bad record."""
        return self.records(self._text_of, bad_records)

    def records[T](
        self, read: Callable[[Mapping[str, Any]], T], bad_records: BadRecords | None = None
    ) -> Iterator[T]:
        """Yields what `read` returns of each row; see `RecordPart`."""
        with _named_errors(self.file.path):
            for number, row in enumerate(self._rows(), self.first_row + 1):
                try:
                    if isinstance(row, UnicodeDecodeError):
                        of = "" if self.column is None else f"column {self.column!r} is "
                        raise BadRecordError(f"{of}{row!r:.40}, not text")
                    yield read(row)
                except BadRecordError as error:
                    located = error.at(f"{self.file.path}, row {number}")
                    if bad_records is None:
                        raise located from None
                    bad_records.add(located)

    def _text_of(self, row: Mapping[str, Any]) -> str:
        if self.column is None:
            return record_as_text(row)
        if not isinstance(text := row[self.column], str):
            raise BadRecordError(f"column {self.column!r} is {text!r:.40}, not text")
        return text

    def _rows(self) -> Iterator[Any]:
        """Yields the rows as dicts; an error in the place of one with invalid UTF-8."""
        for batch in self._batches():
            for start in range(0, batch.num_rows, _BATCH_ROWS):
                self._check_size()
                some = batch.slice(start, _BATCH_ROWS)
                try:
                    yield from some.to_pylist()
                except UnicodeDecodeError:
                    yield from (_row(some.slice(i, 1)) for i in range(some.num_rows))

    def _batches(self) -> Iterator[Any]:
        """Yields record batches with the column, or all."""
        columns = None if self.column is None else [self.column]
        from pyarrow import parquet

        path = self.file.path
        if not _is_parquet(path):
            for index, batch in enumerate(_record_batches(path)):
                if self.groups[0] <= index <= self.groups[-1]:
                    yield batch if columns is None else batch.select(columns)
                self._check_size()
            return
        with parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES) as file:
            yield from file.iter_batches(_BATCH_ROWS, list(self.groups), columns)

    def _check_size(self) -> None:
        """Raises UserError if the file has become shorter: reading mapped memory is then fatal."""
        if (size := os.path.getsize(self.file.path)) < self.file.num_bytes:
            raise UserError(
                f"{self.file.path} has been cut from {self.file.num_bytes} to {size} bytes while "
                "it was read; restore it and run the same command again."
            )


def _row(batch: Any) -> object:
    try:
        return batch.to_pylist()[0]
    except UnicodeDecodeError as error:
        return error


def _is_parquet(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"PAR1"


def _record_batches(path: str) -> Iterator[Any]:
    """Yields the record batches of a mapped file; only the columns that are used are read."""
    import pyarrow

    with pyarrow.memory_map(path) as file, pyarrow.ipc.open_stream(file) as stream:
        yield from stream


def _contents(path: str, column: str | None) -> list[tuple[int, int]]:
    """Returns (rows, bytes) of each group of a file. Raises UserError if it lacks the column."""
    from pyarrow import parquet

    if _is_parquet(path):
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        sizes = [(group.num_rows, group.total_byte_size) for group in groups]
    else:
        batches = list(_record_batches(path))
        names = batches[0].schema.names if batches else [column or ""]
        sizes = [(batch.num_rows, batch.nbytes) for batch in batches]
    if column is not None and column not in names:
        raise UserError(f"{path} has no column {column!r}; set column to one of {sorted(names)}.")
    return sizes


@contextlib.contextmanager
def _named_errors(path: str) -> Iterator[None]:
    """Names the file in errors of the system, and in those of pyarrow about its content."""
    import pyarrow

    with readable(path):
        try:
            yield
        except (pyarrow.ArrowException, OSError) as error:
            if getattr(error, "errno", None):
                raise  # From the disk.
            raise UserError(
                f"{path} cannot be read as a table ({error}); fetch it again, or exclude it from "
                "paths."
            ) from None


class Tables(Source):
    """Rows of Parquet or Arrow files, each a document.

    A `Dataset` saved by `datasets` is a folder of Arrow files. A saved `DatasetDict` is a folder
    per split: name one of them.
    """

    @config_class
    class Config(Source.Config):
        paths: Sequence[str] = REQUIRED  # Files, folders or glob patterns.
        column: str | None = "text"  # The column that holds the document; None: the whole row.

    def parts(self) -> Sequence[Part]:
        """Returns ranges of rows. Raises UserError if a file lacks the column or all lack rows."""
        files, parts = find_files(self.config.paths, (PARQUET, ARROW)), []
        size = part_size(files)
        for file in files:
            with _named_errors(file.path):
                parts += self._parts_of(file, size)
        if not parts:
            more = f" and {len(files) - 1} more files" if len(files) > 1 else ""
            raise UserError(f"{files[0].path}{more} holds no rows; set paths to files with text.")
        return parts

    def _parts_of(self, file: FileStamp, size: int) -> Iterator[Part]:
        """Yields parts of a file, of at least `size` bytes but for the last."""
        groups = _contents(file.path, self.config.column)
        indices: list[int] = []
        num_bytes = first_row = rows = 0
        for index, (group_rows, group_bytes) in enumerate(groups):
            indices.append(index)
            num_bytes += group_bytes
            rows += group_rows
            if rows > first_row and (num_bytes >= size or index == len(groups) - 1):
                yield TablePart(file, self.config.column, tuple(indices), first_row, num_bytes)
                indices, num_bytes, first_row = [], 0, rows
