"""Data sets of TFDS with the texts of a test."""

from collections.abc import Iterable

from moelib.data.sources.tfds import import_tfds


def write_corpus(texts: Iterable[str], data_dir: str, file_format: str = "array_record") -> str:
    """Writes the data set `corpus/mine` with the split "train", and returns its folder."""
    tfds = import_tfds()

    class Corpus(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager):
            return {"train": ((i, {"text": text}) for i, text in enumerate(texts))}

        _generate_examples = None  # Abstract in TFDS; the split is an iterator.

    config = tfds.core.BuilderConfig(name="mine", version="1.0.0")
    builder = Corpus(data_dir=data_dir, file_format=file_format, config=config)
    builder.download_and_prepare()
    return str(builder.data_path)
