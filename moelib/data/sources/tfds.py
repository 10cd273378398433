"""Documents in TensorFlow Datasets (extra `tfds`).

Data sets stored as ArrayRecord or Parquet are read without TensorFlow. Those stored as TFRecord are
read through tf.data, which is imported at their first document.
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.resources
import importlib.resources.abc
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from moelib.core.config import REQUIRED, config_class, did_you_mean
from moelib.core.errors import UserError
from moelib.data.sources.source import BadRecordError, BadRecords, Part, Source

_PART_BYTES = 1 << 24
_FEATURES = "tensorflow_datasets.core.features."  # Modules of TFDS's own features.


class MissingPackageError(UserError, ModuleNotFoundError):
    """An optional package is not installed."""


def _import(module: str, use: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"{use} needs {module}, which is not installed ({error}); install it with "
            f"`pip install 'moelib[tfds]'`."
        ) from error


@functools.cache
def import_tfds() -> Any:
    """Returns TensorFlow Datasets, without importing TensorFlow.

    A data set's features.json names the classes of its features, whose modules TFDS would import.
    Only those of TFDS itself, and modules that are imported already, are allowed.
    """
    # TFDS 4.9.10 imports this backport without requiring it; the standard library suffices.
    sys.modules.setdefault("importlib_resources", importlib.resources)
    tfds = _import("tensorflow_datasets", "A TFDS data set")
    if not hasattr(tfds, "builder"):  # TFDS logs an error in its own imports and goes on.
        raise MissingPackageError(
            "tensorflow_datasets lacks a package, named in the log above; install it with "
            "`pip install 'moelib[tfds]'`."
        )
    find_class = tfds.features.FeatureConnector.cls_from_name

    def find_allowed_class(name: str) -> Any:
        module = name.rpartition(".")[0]
        if not name.startswith(_FEATURES) and module not in sys.modules:
            raise UserError(
                f"features.json may not name {name!r}; if you trust this code, import {module!r} "
                "in your script first."
            )
        return find_class(name)

    tfds.features.FeatureConnector.cls_from_name = staticmethod(find_allowed_class)
    return tfds


def import_tensorflow() -> Any:
    """Returns TensorFlow, kept off accelerators, whose memory it would take from JAX."""
    tf = _import("tensorflow", "Reading TFRecord files")
    for kind in ("GPU", "TPU"):
        tf.config.set_visible_devices([], kind)
    return tf


def open_builder(name: str, data_dir: str | None) -> Any:
    """Returns the builder of a data set, which is downloaded as ArrayRecord if it is missing.

    Args:
        name: A TFDS name such as "c4/en", or the folder of one version of a built data set.
        data_dir: Folder of TFDS data sets; None: TFDS's default.

    Raises:
        MissingPackageError: If TFDS is not installed.
        UserError: If there is no data set of that name, or its folder cannot be read.
    """
    tfds = import_tfds()
    with _named_errors(name):
        try:
            if os.path.isdir(name):
                return tfds.builder_from_directory(name)
            builder = tfds.builder(name, data_dir=data_dir)
        except tfds.core.DatasetNotFoundError as error:
            first = str(error).strip().split("\n")[0]
            raise UserError(
                f"TFDS has no data set {name!r} (data_dir={data_dir}): {first} Set name to "
                "another, or to the folder of a built data set."
            ) from None
    if not builder.is_prepared():
        builder = tfds.builder(name, data_dir=data_dir, file_format="array_record")
        builder.download_and_prepare()
    return builder


@contextlib.contextmanager
def _named_errors(name: str) -> Iterator[None]:
    """Names the data set in errors about its files, for which TFDS has many classes."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"{name}: {error}") from None
    except Exception as error:
        raise UserError(
            f"{name} cannot be read as a data set of TFDS ({error!s:.300}); copy or build it again."
        ) from error


def check_split_and_feature(builder: Any, split: str, feature: str) -> None:
    """Raises UserError if a data set has no such split, or no such feature."""
    name, splits, features = builder.info.full_name, builder.info.splits, builder.info.features
    if split not in splits:
        raise UserError(f"{name} has no split {split!r}; " + did_you_mean(split, splits))
    if feature not in features:
        raise UserError(
            f"{name} has no feature {feature!r}; set text_field: "
            + did_you_mean(feature, list(features))
        )


@dataclasses.dataclass(frozen=True)
class TFDSPart:
    """A range of examples of a split."""

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
        """Yields the texts; a text that is not UTF-8 is a bad record."""
        for index, text in enumerate(self._texts(), self.start):
            try:
                yield text.decode() if isinstance(text, bytes) else str(text)
            except UnicodeDecodeError as error:
                located = BadRecordError(f"{self.folder} {self.split}[{index}]: {error}")
                if bad_records is None:
                    raise located from None
                bad_records.add(located)

    def _texts(self) -> Iterator[bytes | str]:
        builder = open_builder(self.folder, None)
        split = f"{self.split}[{self.start}:{self.end}]"
        examples: Any
        if (file_format := builder.info.file_format.value) in ("array_record", "parquet"):
            if file_format == "array_record":
                _import("array_record", "A data set stored as ArrayRecord")
            examples = builder.as_data_source(split=split)
        else:
            import_tensorflow()
            examples = builder.as_dataset(split=split, shuffle_files=False).as_numpy_iterator()
        with _named_errors(self.name):
            for example in examples:
                yield example[self.feature]


class TFDSSource(Source):
    """Texts of a TFDS data set, named as in TFDS or by its folder."""

    @config_class
    class Config(Source.Config):
        name: str = REQUIRED  # Such as "c4/en", or the folder of a built data set.
        data_dir: str | None = None  # Folder of TFDS data sets; None: TFDS's default.
        split: str = "train"  # Split of the data set.
        text_field: str = "text"  # The feature that holds the document.

    def parts(self) -> Sequence[Part]:
        """Returns ranges of the split. Raises UserError if it is empty, or lacks the feature."""
        cfg = self.config
        builder = open_builder(cfg.name, cfg.data_dir)
        check_split_and_feature(builder, cfg.split, cfg.text_field)
        info = builder.info.splits[cfg.split]
        count, size = info.num_examples, info.num_bytes
        if not count:
            raise UserError(f"split={cfg.split!r}: it is empty in {builder.info.full_name}.")
        step = max(count * _PART_BYTES // max(size, 1), 1)
        folder = os.fspath(builder.data_path)
        ranges = [(start, min(start + step, count)) for start in range(0, count, step)]
        return [
            TFDSPart(folder, cfg.split, start, end, cfg.text_field, size * (end - start) // count)
            for start, end in ranges
        ]
