"""Documents in Parquet files, a row each."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from moelib.core.config import REQUIRED, config_class
from moelib.data.files import FileStamp, find_files, part_size
from moelib.data.source import BadRecordError, BadRecords, Part, Source


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
        paths: Sequence[str] = REQUIRED  # Files, folders or glob patterns.
        column: str = "text"  # The column that holds the document.

    def parts(self) -> Sequence[Part]:
        """Returns row groups. Raises ValueError if a file lacks the column, or none has a row."""
        files = find_files(self.config.paths, (".parquet",))
        parts = [part for file in files for part in self._parts_of(file, part_size(files))]
        if not parts:
            more = f" and {len(files) - 1} more files" if len(files) > 1 else ""
            raise ValueError(f"{files[0].path}{more} holds no rows; set paths to files with text.")
        return parts

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
            if rows > first_row and (num_bytes >= size or index == metadata.num_row_groups - 1):
                yield ParquetPart(file, column, tuple(groups), first_row, num_bytes)
                groups, num_bytes, first_row = [], 0, rows
