"""Streaming input: text too large to prepare, read by tf.data, tokenized and packed on the way.

For training only. Documents come in a shuffled order that a restart reproduces exactly, but which,
unlike a prepared store's, depends on the number of hosts, and batches have no random access.
Packing is concat-and-split with the pairs of `moelib.data.packing`; the sequences of a long
document follow one another.

tf.data reads and shuffles records natively, so that its iterator can be checkpointed; parsing,
tokenizing and packing happen in Python behind it. The state contains that of tf.data with its
shuffle buffer: a few MB for 1000 documents. TensorFlow comes with the extra `tfds`.

Letters: B sequences of this host's batch, S sequence length.
"""

import base64
import itertools
import os
import tempfile
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moelib.core.config import REQUIRED, config_class
from moelib.core.errors import UserError
from moelib.data.fill import fill_pieces
from moelib.data.input import (
    BatchIterator,
    Input,
    State,
    check_state,
    empty_batch,
    rows_of_host,
)
from moelib.data.packing import DocumentBoundary, Packing, make_plan
from moelib.data.source import BadRecordError
from moelib.data.text_stream import TextStream
from moelib.data.tfds_import import import_tensorflow
from moelib.data.token_source import TokenSource
from moelib.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from moelib.core.tree import Batch

_DOCUMENTS_AT_ONCE = 32  # Tokenized together.


class StreamingInput(Input):
    """Batches of documents that are tokenized as they are read, epoch after epoch."""

    @config_class
    class Config(Input.Config):
        stream: TextStream.Config = REQUIRED  # The documents.
        tokenizer: Tokenizer.Config = REQUIRED  # Encodes the documents.
        # Segments, positions and targets where one document follows another.
        document_boundary: DocumentBoundary = DocumentBoundary.RESET
        seed: int = 0  # Of the order of documents.
        shuffle_buffer: int = 1024  # Documents among which the next is drawn; 1 keeps the order.
        max_bad_records: int = 0  # Records without a document to skip; one more is an error.
        snapshot_every: int = 64  # Batches between snapshots; a restart repeats up to as many.
        vocab_size: int | None = None  # The model's; a tokenizer with a larger one is refused.

    def __init__(self, cfg: Config) -> None:
        """Loads the tokenizer; reads no text. Raises UserError if its vocabulary is too large."""
        super().__init__(cfg)
        cfg = self.config
        self.tokenizer: Any = cfg.tokenizer.instantiate()
        self.stream: Any = cfg.stream.instantiate()
        if cfg.vocab_size is not None and self.tokenizer.vocab_size > cfg.vocab_size:
            raise UserError(
                f"vocab_size={cfg.vocab_size}: the tokenizer has {self.tokenizer.vocab_size} "
                "tokens; set the model's vocab_size to at least that."
            )

    @classmethod
    def load_tokenizer(cls, cfg: Any) -> Tokenizer:
        """Returns the tokenizer of the config."""
        return cfg.tokenizer.instantiate()

    def iterator(self, host_index: int = 0, num_hosts: int = 1) -> "StreamingIterator":
        """Returns a host's batches, without end."""
        rows = len(rows_of_host(self.config.global_batch_size, host_index, num_hosts))
        return StreamingIterator(self, host_index, num_hosts, rows)

    def identity_of_host(self, host_index: int, num_hosts: int) -> State:
        """Returns the settings and data that determine a host's batches, as JSON values."""
        cfg = self.config
        return {
            "stream": self.stream.fingerprint(),
            "tokenizer": self.tokenizer.fingerprint,
            "seq_len": cfg.seq_len,
            "global_batch_size": cfg.global_batch_size,
            "document_boundary": cfg.document_boundary.value,
            "seed": cfg.seed,
            "shuffle_buffer": cfg.shuffle_buffer,
            "host_index": host_index,
            "num_hosts": num_hosts,
        }


class StreamingIterator(BatchIterator):
    """One host's batches. Its state belongs to this host, and to this number of hosts."""

    def __init__(self, owner: StreamingInput, host_index: int, num_hosts: int, rows: int) -> None:
        self._owner, self._num_rows = owner, rows
        self._host = (host_index, num_hosts)
        self._identity = owner.identity_of_host(host_index, num_hosts)
        self._pending = _PendingDocuments(owner.tokenizer)
        self.step = self.num_bad_records = 0
        self._records = iter(self._dataset())
        self._snapshot = self._take_snapshot()

    def _dataset(self) -> Any:
        cfg = self._owner.config
        records = self._owner.stream.records(*self._host)
        records = records.shuffle(cfg.shuffle_buffer, seed=cfg.seed, reshuffle_each_iteration=True)
        return records.repeat().prefetch(_DOCUMENTS_AT_ONCE)

    def __next__(self) -> "Batch":
        """Returns this host's sequences of the next batch.

        Raises:
            BadRecordError: At a record without a document, beyond `max_bad_records`.
            UserError: If there is no text at all.
        """
        cfg = self._owner.config
        if self.step and self.step % cfg.snapshot_every == 0:
            self._snapshot = self._take_snapshot()
        while self._pending.num_pairs(cfg.document_boundary) < self._num_rows * cfg.seq_len:
            self._read_documents()
        self.step += 1
        return self._pending.take(self._num_rows, cfg.seq_len, cfg.document_boundary)

    def _read_documents(self) -> None:
        """Reads and tokenizes some documents."""
        texts, num_read = [], 0
        while not texts:
            for location, content in itertools.islice(self._records, _DOCUMENTS_AT_ONCE):
                num_read += 1
                if text := self._text(location.numpy(), content.numpy()):
                    texts.append(text)
            if (not texts and num_read >= 100_000) or not num_read:
                raise UserError(
                    f"The stream has no text in {num_read} records; set paths to files with text."
                )
        self._pending.add(texts)

    def _text(self, location: bytes, content: bytes) -> str:
        """Returns a record's document; a record without one counts as an empty document."""
        try:
            return self._owner.stream.text(content)
        except BadRecordError as error:
            self.num_bad_records += 1
            if self.num_bad_records <= (most := self._owner.config.max_bad_records):
                return ""
            raise BadRecordError(
                f"{location.decode()}: {error}; correct it, or set max_bad_records={most} larger "
                "to skip such records."
            ) from None

    def _take_snapshot(self) -> State:
        """Returns the complete state of reading."""
        return {
            "step": self.step,
            "bad_records": self.num_bad_records,
            "pending": self._pending.state(),
            "tf_data": _save_iterator(self._records),
        }

    def state(self) -> State:
        """Returns the last snapshot and the step: cheap enough for every batch."""
        return {"step": self.step, "snapshot": self._snapshot, "input": self._identity}

    def restore(self, state: State) -> None:
        """Goes to the snapshot, and repeats the batches since.

        Raises UserError if the saved input had other batches, or was another host's.
        """
        check_state(state, self._identity)
        snapshot = state["snapshot"]
        self._records = iter(self._dataset())
        _restore_iterator(self._records, snapshot["tf_data"])
        self._pending.restore(snapshot["pending"])
        self.step, self.num_bad_records = snapshot["step"], snapshot["bad_records"]
        self._snapshot = snapshot
        while self.step < state["step"]:
            next(self)


class _PendingDocuments(TokenSource):
    """Tokenized documents that are not, or not entirely, in a batch yet."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(type(self).default_config())
        self._tokenizer = tokenizer
        self.name = "stream"
        self.vocab_size, self.eos_id = tokenizer.vocab_size, tokenizer.eos_id
        self.token_num_bytes = tokenizer.token_num_bytes()
        self._hold(np.empty(0, np.int32), [])

    def _hold(self, tokens: npt.NDArray[np.int32], lengths: Sequence[int]) -> None:
        self._tokens, self.lengths = tokens, np.array(lengths, np.int64)
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.file_starts = np.array([0, len(tokens)], np.int64)

    def file(self, index: int) -> npt.NDArray[np.int32]:
        """Returns all tokens."""
        del index
        return self._tokens

    def add(self, texts: Sequence[str]) -> None:
        """Appends documents, each with its end-of-text token."""
        new = [
            np.array([*ids, self.eos_id], np.int32) for ids in self._tokenizer.encode_batch(texts)
        ]
        self._hold(np.concatenate([self._tokens, *new]), [*self.lengths, *map(len, new)])

    def num_pairs(self, boundary: DocumentBoundary) -> int:
        """Returns the number of pairs of a token and its target."""
        if boundary is DocumentBoundary.CONTINUE:
            return max(len(self._tokens) - 1, 0)
        return len(self._tokens) - len(self.lengths)

    def take(self, num_rows: int, seq_len: int, boundary: DocumentBoundary) -> "Batch":
        """Returns full sequences, and drops the tokens before the last target."""
        plan = make_plan(self, seq_len, Packing.CONCAT_AND_SPLIT, boundary, None)
        pieces = plan.pieces(np.arange(num_rows))
        batch = empty_batch(num_rows, seq_len, self.eos_id)
        fill_pieces(batch, np.arange(num_rows), pieces, self, boundary)
        first = int(pieces.next_token[-1])  # The last target is the next sequence's first token.
        left = np.maximum(self.starts + self.lengths - first, 0)
        self._hold(self._tokens[first:], np.minimum(left, self.lengths)[left > 0].tolist())
        return batch

    def state(self) -> State:
        """Returns the documents as JSON values."""
        return {
            "tokens": _encode(self._tokens.astype("<i4").tobytes()),
            "lengths": self.lengths.tolist(),
        }

    def restore(self, state: State) -> None:
        """Replaces the documents by saved ones."""
        tokens = np.frombuffer(_decode(state["tokens"]), "<i4").astype(np.int32)
        self._hold(tokens, state["lengths"])


def _encode(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 1)).decode()


def _decode(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


def _save_iterator(iterator: Any) -> dict[str, str]:
    """Returns the state of a tf.data iterator, as the files that TensorFlow writes for it."""
    tf = import_tensorflow()
    with tempfile.TemporaryDirectory() as folder:
        tf.train.Checkpoint(iterator=iterator).write(os.path.join(folder, "state"))
        files = {}
        for name in sorted(os.listdir(folder)):
            with open(os.path.join(folder, name), "rb") as file:
                files[name] = _encode(file.read())
    return files


def _restore_iterator(iterator: Any, files: dict[str, str]) -> None:
    """Sets a tf.data iterator to a saved state. Raises UserError if that names other folders."""
    tf = import_tensorflow()
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            if os.path.basename(name) != name:
                raise UserError(
                    f"The saved position in the data has a file {name!r:.80} outside its folder; "
                    "resume from another checkpoint."
                )
            with open(os.path.join(folder, name), "wb") as file:
                file.write(_decode(content))
        read = tf.train.Checkpoint(iterator=iterator).read(os.path.join(folder, "state"))
        read.assert_consumed()
