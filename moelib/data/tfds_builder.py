"""Writing text corpora as TFDS data sets: on one machine, or with Apache Beam on many.

Importing this imports TFDS, which imports TensorFlow only for TFRecord files.
"""

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from moelib.data.source import Part, Source, fingerprint
from moelib.data.tfds_import import import_tfds

tfds = import_tfds()

VERSION = "1.0.0"
SOURCE_FILE = "moelib_source.json"  # In the data set's folder.
_Example = tuple[str, dict[str, str]]


def _info(builder: Any, source: Source) -> Any:
    return tfds.core.DatasetInfo(
        builder=builder,
        description=f"Text of a {type(source).__name__}, a document an example.",
        features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
    )


def _examples(numbered_part: tuple[int, Part]) -> Iterator[_Example]:
    """Yields a part's documents with keys that no other document has; empty ones are left out."""
    number, part = numbered_part
    for index, text in enumerate(part.documents()):
        if text:
            yield f"{number:06d}-{index:09d}", {"text": text}


class TextCorpus(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A source's documents as the split "train" of a data set, written by this process."""

    VERSION = tfds.core.Version(VERSION)

    def __init__(self, source: Source, **kwargs: Any) -> None:
        self._source = source
        super().__init__(**kwargs)

    def _info(self) -> Any:
        return _info(self, self._source)

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        del dl_manager
        return {"train": self._generate_examples(self._source.parts())}

    def _generate_examples(self, parts: Sequence[Part]) -> Iterator[_Example]:
        for numbered_part in enumerate(parts):
            yield from _examples(numbered_part)


class BeamTextCorpus(tfds.core.BeamBasedBuilder, skip_registration=True):
    """The same data set, written by a Beam pipeline: one step a part, on any runner."""

    VERSION = tfds.core.Version(VERSION)
    name = TextCorpus.name

    def __init__(self, source: Source, **kwargs: Any) -> None:
        self._source = source
        super().__init__(**kwargs)

    def _info(self) -> Any:
        return _info(self, self._source)

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        del dl_manager
        return {"train": self._generate_examples(self._source.parts())}

    def _generate_examples(self, parts: Sequence[Part]) -> Any:
        import apache_beam as beam

        return beam.Create(list(enumerate(parts))) | beam.FlatMap(_examples)


def build_text_corpus(
    source: Source,
    name: str,
    data_dir: str,
    *,
    file_format: str = "array_record",
    num_shards: int | None = None,
    beam_options: Any | None = None,
    beam_runner: str | None = None,
) -> str:
    """Writes a data set, unless it is there, and returns its folder: a name for `TFDSSource`.

    The folder says in `moelib_source.json` what it was made from.

    Args:
        source: The documents. Empty ones are left out.
        name: Tells corpora apart: the data set is "text_corpus/<name>".
        data_dir: Where TFDS keeps its data sets.
        file_format: "array_record", "parquet", or "tfrecord", which needs TensorFlow.
        num_shards: Files; None lets TFDS choose by size.
        beam_options: Options of a Beam pipeline, which then does the work (extra `beam`).
        beam_runner: A Beam runner such as "DirectRunner", which then does the work.

    Raises:
        ModuleNotFoundError: If Beam should do the work and is not installed.
        FileExistsError: If the data set is there and was made from another source.
        ValueError: If the source has nothing to read or a broken record, or file_format is unknown.
    """
    config = tfds.core.BuilderConfig(name=name, version=VERSION)
    kwargs = {"data_dir": data_dir, "file_format": file_format, "config": config}
    download = tfds.download.DownloadConfig(num_shards=num_shards)
    builder: Any
    if beam_options is None and beam_runner is None:
        builder = TextCorpus(source, **kwargs)
    else:
        _require_beam()
        builder = BeamTextCorpus(source, **kwargs)
        download = download.replace(beam_options=beam_options, beam_runner=beam_runner)
    folder, made_from = str(builder.data_path), {"source": fingerprint(source.parts())}
    place = os.path.join(folder, SOURCE_FILE)
    if builder.is_prepared():
        _check_made_from(place, made_from, name)
    else:
        builder.download_and_prepare(download_config=download)
        with open(place, "w", encoding="utf-8") as file:
            json.dump(made_from, file)
    return folder


def _check_made_from(place: str, made_from: dict[str, str], name: str) -> None:
    """Raises FileExistsError unless a data set says that it was made from this source."""
    try:
        with open(place, encoding="utf-8") as file:
            found = json.load(file)
    except FileNotFoundError:
        found = None  # Killed before it was written, or of an older version: made from who knows.
    if found != made_from:
        raise FileExistsError(
            f"{os.path.dirname(place)} was made from another source, or does not say from which; "
            f"set name to another than {name!r}, or delete that folder to make it again."
        )


def _require_beam() -> None:
    import importlib.util

    if importlib.util.find_spec("apache_beam") is None:
        raise ModuleNotFoundError(
            "Apache Beam is not installed; install it with `pip install moelib[beam]`, or leave "
            "beam_options and beam_runner out."
        )
