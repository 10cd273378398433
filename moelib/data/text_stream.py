"""Records of text that tf.data reads for a `StreamingInput`.

tf.data reads records natively, so that its iterator can be checkpointed; Python extracts the
documents afterwards.
"""

import hashlib
import json
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from moelib.core.config import REQUIRED, Configurable, config_class
from moelib.core.errors import UserError
from moelib.data.files import FileStamp, find_files
from moelib.data.json_lines import ENDINGS, text_of
from moelib.data.source import BadRecordError
from moelib.data.tfds_import import import_tensorflow
from moelib.data.tfds_source import check_split_and_feature, open_builder


class TextStream(Configurable):
    """Records for tf.data: pairs (location, content) of strings."""

    @config_class
    class Config(Configurable.Config):
        pass

    @abstractmethod
    def records(self, host_index: int, num_hosts: int) -> Any:
        """Returns one pass over a host's records, a tf.data.Dataset of (location, content)."""

    @abstractmethod
    def text(self, content: bytes) -> str:
        """Returns a record's document. Raises BadRecordError if it has none."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Returns a hash that identifies the data."""


class JsonLinesStream(TextStream):
    """Lines of JSON files, plain or .gz. Hosts share the files, or the lines if files are few."""

    @config_class
    class Config(TextStream.Config):
        paths: Sequence[str] = REQUIRED  # Files, folders or glob patterns.
        text_field: str = "text"  # The field of a line that holds the document.
        num_open_files: int = 4  # Files that are read alternately.

    def _files(self) -> list[FileStamp]:
        files = find_files(self.config.paths, ENDINGS)
        packed = [file.path for file in files if file.path.endswith((".zst", ".zstd"))]
        if packed:
            more = f" and {len(packed) - 1} more" if len(packed) > 1 else ""
            raise UserError(
                f"{packed[0]}{more}: tf.data cannot decompress .zst; prepare a token store of it, "
                "or set paths to plain or .gz files."
            )
        return files

    def records(self, host_index: int, num_hosts: int) -> Any:
        """Returns lines with their file and number."""
        tf = import_tensorflow()
        paths = [file.path for file in self._files()]
        share_files = len(paths) >= num_hosts
        if share_files:
            paths = paths[host_index::num_hosts]

        def lines(path: Any) -> Any:
            packed = tf.where(tf.strings.regex_full_match(path, r".*\.gz"), "GZIP", "")
            numbered = tf.data.TextLineDataset(path, compression_type=packed).enumerate(1)
            name = lambda number: tf.strings.join([path, ":", tf.strings.as_string(number)])
            return numbered.map(lambda number, line: (name(number), line))

        files = tf.data.Dataset.from_tensor_slices(paths)
        records = files.interleave(lines, cycle_length=self.config.num_open_files)
        return records if share_files else records.shard(num_hosts, host_index)

    def text(self, content: bytes) -> str:
        """Returns the text field; a blank line is an empty document."""
        return text_of(content, self.config.text_field) if content.strip() else ""

    def fingerprint(self) -> str:
        """Returns a hash of the files' paths and sizes."""
        return _hash([(file.path, file.num_bytes) for file in self._files()])


class TFDSStream(TextStream):
    """Examples of a TFDS data set stored as TFRecord."""

    @config_class
    class Config(TextStream.Config):
        name: str = REQUIRED  # Such as "c4/en", or the folder of a built data set.
        data_dir: str | None = None  # Folder of TFDS data sets; None: TFDS's default.
        split: str = "train"  # Split of the data set.
        text_field: str = "text"  # The feature that holds the document.

    def _builder(self) -> Any:
        cfg = self.config
        builder = open_builder(cfg.name, cfg.data_dir)
        check_split_and_feature(builder, cfg.split, cfg.text_field)
        if (found := builder.info.file_format.value) != "tfrecord":
            raise UserError(
                f"{builder.info.full_name} is stored as {found}, which tf.data cannot read; "
                "prepare a token store from TFDSSource, or build it as tfrecord."
            )
        return builder

    def records(self, host_index: int, num_hosts: int) -> Any:
        """Returns every num_hosts-th example with its number."""
        tf = import_tensorflow()
        cfg, builder = self.config, self._builder()
        name = f"{builder.info.full_name} {cfg.split} "
        examples = builder.as_dataset(split=cfg.split, shuffle_files=False).enumerate()

        def record(number: Any, example: Any) -> Any:
            return tf.strings.join([name, tf.strings.as_string(number)]), example[cfg.text_field]

        return examples.map(record).shard(num_hosts, host_index)

    def text(self, content: bytes) -> str:
        """Returns the text."""
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise BadRecordError(f"not UTF-8: {error}") from None

    def fingerprint(self) -> str:
        """Returns a hash of the split's name and size."""
        info = self._builder().info
        split = info.splits[self.config.split]
        return _hash([info.full_name, self.config.split, split.num_examples, split.num_bytes])


def _hash(described: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()
