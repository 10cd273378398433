"""Documents in the rows of Parquet files."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any

from moelib.core.config import REQUIRED, config_class
from moelib.core.errors import UserError
from moelib.data.files import FileStamp, find_files, part_size
from moelib.data.source import BadRecordError, BadRecords, Part, Source
from moelib.runtime.files import readable

_BUFFER_BYTES = 1 << 20  # Of a column that is read; without a limit, the whole of it.
_BATCH_ROWS = 64  # Documents that are decompressed at a time; they may be long.


@dataclasses.dataclass(frozen=True)
class ParquetPart:
    """Some row groups of a Parquet file."""

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
        """Yields the values of the column; a value that is not text is a bad record."""
        row = self.first_row
        with _named_errors(self.file.path):
            for text in self._values():
                row += 1
                if isinstance(text, str):
                    yield text
                    continue
                error = BadRecordError(
                    f"{self.file.path}, row {row}: column {self.column!r} is {text!r:.40}, not text"
                )
                if bad_records is None:
                    raise error
                bad_records.add(error)

    def _values(self) -> Iterator[object]:
        """Yields the values of the column; an error in the place of invalid UTF-8."""
        for values in self._batches():
            for start in range(0, len(values), _BATCH_ROWS):
                self._check_size()
                some = values.slice(start, _BATCH_ROWS)
                try:
                    yield from some.to_pylist()
                except UnicodeDecodeError:
                    yield from map(_value, some)

    def _check_size(self) -> None:
        """Raises UserError if the file has become shorter: reading mapped memory is then fatal."""
        if (size := os.path.getsize(self.file.path)) < self.file.num_bytes:
            raise UserError(
                f"{self.file.path} has been cut from {self.file.num_bytes} to {size} bytes while "
                "it was read; restore it and run the same command again."
            )

    def _batches(self) -> Iterator[Any]:
        """Yields the column's values as Arrow arrays."""
        from pyarrow import parquet

        groups, columns = list(self.row_groups), [self.column]
        with parquet.ParquetFile(self.file.path, buffer_size=_BUFFER_BYTES) as file:
            for batch in file.iter_batches(_BATCH_ROWS, row_groups=groups, columns=columns):
                yield batch.column(0)


def _value(scalar: Any) -> object:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return error


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


class Parquet(Source):
    """Rows of Parquet files, each a document."""

    ending = ".parquet"
    part = ParquetPart

    @config_class
    class Config(Source.Config):
        paths: Sequence[str] = REQUIRED  # Files, folders or glob patterns.
        column: str = "text"  # The column that holds the document.

    def parts(self) -> Sequence[Part]:
        """Returns ranges of rows. Raises UserError if a file lacks the column or all lack rows."""
        files, parts = find_files(self.config.paths, (self.ending,)), []
        size = part_size(files)
        for file in files:
            with _named_errors(file.path):
                names, groups = self._contents(file.path)
                parts += self._parts_of(file, names, groups, size)
        if not parts:
            more = f" and {len(files) - 1} more files" if len(files) > 1 else ""
            raise UserError(f"{files[0].path}{more} holds no rows; set paths to files with text.")
        return parts

    def _contents(self, path: str) -> tuple[list[str], list[tuple[int, int]]]:
        """Returns the names of the columns, and (rows, bytes) of each row group."""
        from pyarrow import parquet

        with parquet.ParquetFile(path) as file:
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            return file.schema_arrow.names, [(g.num_rows, g.total_byte_size) for g in groups]

    def _parts_of(
        self, file: FileStamp, names: list[str], groups: list[tuple[int, int]], size: int
    ) -> Iterator[Part]:
        column = self.config.column
        if column not in names:
            raise UserError(
                f"{file.path} has no column {column!r}; set column to one of {sorted(names)}."
            )
        indices: list[int] = []
        num_bytes = first_row = rows = 0
        for index, (group_rows, group_bytes) in enumerate(groups):
            indices.append(index)
            num_bytes += group_bytes
            rows += group_rows
            if rows > first_row and (num_bytes >= size or index == len(groups) - 1):
                yield self.part(file, column, tuple(indices), first_row, num_bytes)
                indices, num_bytes, first_row = [], 0, rows
