"""Documents in the rows of Arrow files, as `Dataset.save_to_disk` of `datasets` writes them."""

from collections.abc import Iterator
from typing import Any

from moelib.core.config import config_class
from moelib.data.parquet import Parquet, ParquetPart

# Files of `datasets` next to the tables, which hold no text.
JSON_FILES = ("dataset_dict.json", "dataset_info.json", "state.json")


class ArrowPart(ParquetPart):
    """Some record batches of an Arrow file."""

    def _batches(self) -> Iterator[Any]:
        for index, batch in enumerate(_record_batches(self.file.path)):
            if self.row_groups[0] <= index <= self.row_groups[-1]:
                yield batch.column(self.column)
            self._check_size()


def _record_batches(path: str) -> Iterator[Any]:
    """Yields the record batches of a mapped file; only the columns that are used are read."""
    import pyarrow

    with pyarrow.memory_map(path) as file, pyarrow.ipc.open_stream(file) as stream:
        yield from stream


class ArrowFiles(Parquet):
    """Rows of Arrow files, each a document.

    A saved `Dataset` is a folder. A saved `DatasetDict` is a folder per split: name one of them.
    """

    ending = ".arrow"
    part = ArrowPart

    @config_class
    class Config(Parquet.Config):
        pass

    def _contents(self, path: str) -> tuple[list[str], list[tuple[int, int]]]:
        batches = list(_record_batches(path))
        names = batches[0].schema.names if batches else [self.config.column]
        return names, [(batch.num_rows, batch.nbytes) for batch in batches]
