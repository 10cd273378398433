"""Writing text corpora as TFDS data sets: on one machine, or with Apache Beam on many.

Importing this module imports TFDS, which imports TensorFlow only for TFRecord files.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any

from moelib.core.errors import ExistingFileError
from moelib.core.files import read_json, write_json
from moelib.data.source import Part, Source, fingerprint, texts_of
from moelib.data.tfds_import import import_beam, import_tfds

tfds = import_tfds()

VERSION = "1.0.0"
SOURCE_FILE = "moelib_source.json"  # In the data set's folder.
_Example = tuple[str, dict[str, str]]


def _examples(numbered_part: tuple[int, Part]) -> Iterator[_Example]:
    """Yields a part's documents with unique keys; empty ones are skipped."""
    number, part = numbered_part
    for index, text in enumerate(texts_of(part)):
        if text:
            yield f"{number:06d}-{index:09d}", {"text": text}


class TextCorpus(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A source's documents as the split "train" of a data set."""

    VERSION = tfds.core.Version(VERSION)

    def __init__(self, source: Source, *, with_beam: bool, **kwargs: Any) -> None:
        self._source, self._with_beam = source, with_beam
        super().__init__(**kwargs)

    def _info(self) -> Any:
        return tfds.core.DatasetInfo(
            builder=self,
            description=f"Text of a {type(self._source).__name__}, one document per example.",
            features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        del dl_manager
        return {"train": self._generate_examples(self._source.parts())}

    def _generate_examples(self, parts: Sequence[Part]) -> Any:
        """Returns an iterator, or a Beam transform with one step per part."""
        numbered = list(enumerate(parts))
        if self._with_beam:
            beam = import_beam()
            return beam.Create(numbered) | beam.FlatMap(_examples)
        return (example for part in numbered for example in _examples(part))


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
    """Writes a data set, unless it exists, and returns its folder: a name for `TFDSSource`.

    The file `moelib_source.json` in the folder identifies the source.

    Args:
        source: The documents. Empty ones are skipped.
        name: Name of the corpus; the data set is "text_corpus/<name>".
        data_dir: Folder of TFDS data sets.
        file_format: "array_record", "parquet", or "tfrecord", which needs TensorFlow.
        num_shards: Number of files; None: chosen by TFDS.
        beam_options: Options of a Beam pipeline, which then does the work (extra `beam`).
        beam_runner: A Beam runner such as "DirectRunner", which then does the work.

    Raises:
        MissingPackageError: If Beam is to do the work and is not installed.
        ExistingFileError: If the data set exists and was made from another source.
        UserError: If the source has nothing to read or a broken record.
    """
    with_beam = beam_options is not None or beam_runner is not None
    download = tfds.download.DownloadConfig(num_shards=num_shards)
    if with_beam:
        import_beam()
        download = download.replace(beam_options=beam_options, beam_runner=beam_runner)
    builder: Any = TextCorpus(
        source,
        with_beam=with_beam,
        data_dir=data_dir,
        file_format=file_format,
        config=tfds.core.BuilderConfig(name=name, version=VERSION),
    )
    folder, made_from = str(builder.data_path), {"source": fingerprint(source.parts())}
    path = os.path.join(folder, SOURCE_FILE)
    if not builder.is_prepared():
        builder.download_and_prepare(download_config=download)
        write_json(path, made_from)
        return folder
    if read_json(path) != made_from:  # Empty if killed before it was written.
        raise ExistingFileError(
            f"{folder} was made from another, or an unknown, source; set name to another than "
            f"{name!r}, or delete that folder to make it again."
        )
    return folder
