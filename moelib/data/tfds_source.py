"""Documents in TensorFlow Datasets.

Data sets stored as ArrayRecord or Parquet are read without TensorFlow; those stored as TFRecord
need it, and it is imported when their first document is read.
"""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any

from moelib.core.config import REQUIRED, config_class, did_you_mean
from moelib.data.source import BadRecordError, BadRecords, Part, Source
from moelib.data.tfds_import import import_tensorflow, import_tfds

_PART_BYTES = 1 << 24


def open_builder(name: str, data_dir: str | None) -> Any:
    """Returns the builder of a data set that is there, or made there as ArrayRecord.

    Args:
        name: A TFDS name such as "c4/en", or the folder of one version of a built data set.
        data_dir: Where TFDS keeps its data sets; None is its own default.

    Raises:
        ValueError: If there is no data set of that name.
    """
    tfds = import_tfds()
    if os.path.isdir(name):
        return tfds.builder_from_directory(name)
    try:
        builder = tfds.builder(name, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError as error:
        first = str(error).strip().split("\n")[0]
        raise ValueError(
            f"TFDS has no data set {name!r} (data_dir is {data_dir}): {first} Set name to one it "
            "has, or to the folder of a built one."
        ) from None
    if not builder.is_prepared():
        builder = tfds.builder(name, data_dir=data_dir, file_format="array_record")
        builder.download_and_prepare()
    return builder


def check_split_and_feature(builder: Any, split: str, feature: str) -> None:
    """Raises ValueError if a data set has no such split, or no such feature."""
    name, splits, features = builder.info.full_name, builder.info.splits, builder.info.features
    if split not in splits:
        raise ValueError(f"{name} has no split {split!r}; " + did_you_mean(split, splits))
    if feature not in features:
        raise ValueError(
            f"{name} has no feature {feature!r}; set text_field: "
            + did_you_mean(feature, list(features))
        )


@dataclasses.dataclass(frozen=True)
class TFDSPart:
    """A range of a split."""

    folder: str  # Of the built data set.
    split: str
    start: int
    end: int
    feature: str
    num_bytes: int

    @property
    def name(self) -> str:
        """The data set and the range."""
        return f"{self.folder} {self.split}[{self.start}:{self.end}]"

    def documents(self, bad_records: BadRecords | None = None) -> Iterator[str]:
        """Yields the texts; one that is not UTF-8 is a bad record."""
        for index, text in enumerate(self._texts(), self.start):
            try:
                yield text.decode() if isinstance(text, bytes) else str(text)
            except UnicodeDecodeError as error:
                wrapped = BadRecordError(f"{self.folder} {self.split}[{index}]: {error}")
                if bad_records is None:
                    raise wrapped from None
                bad_records.add(wrapped)

    def _texts(self) -> Iterator[bytes | str]:
        builder = open_builder(self.folder, None)
        split = f"{self.split}[{self.start}:{self.end}]"
        if builder.info.file_format.value in ("array_record", "parquet"):
            records: Any = builder.as_data_source(split=split)
        else:
            import_tensorflow()
            records = builder.as_dataset(split=split, shuffle_files=False).as_numpy_iterator()
        for record in records:
            yield record[self.feature]


class TFDSSource(Source):
    """Texts of a data set, by its name in TFDS or its folder."""

    @config_class
    class Config(Source.Config):
        name: str = REQUIRED  # Such as "c4/en", or the folder of a built data set.
        data_dir: str | None = None  # Where TFDS keeps data sets; None is its own default.
        split: str = "train"
        text_field: str = "text"

    def parts(self) -> Sequence[Part]:
        """Returns ranges of the split.

        Raises:
            ValueError: If there is no such data set, split or feature, or it is empty.
        """
        cfg = self.config
        builder = open_builder(cfg.name, cfg.data_dir)
        check_split_and_feature(builder, cfg.split, cfg.text_field)
        info = builder.info.splits[cfg.split]
        count, size = info.num_examples, info.num_bytes
        if not count:
            raise ValueError(
                f"Split {cfg.split!r} of {builder.info.full_name} is empty; set split."
            )
        step = max(count * _PART_BYTES // max(size, 1), 1)
        folder = os.fspath(builder.data_path)
        return [
            TFDSPart(
                folder,
                cfg.split,
                start,
                min(start + step, count),
                cfg.text_field,
                size * (min(start + step, count) - start) // count,
            )
            for start in range(0, count, step)
        ]
