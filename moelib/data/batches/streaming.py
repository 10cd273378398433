"""Streaming input: documents of any source, tokenized and packed while a model trains.

For training only, on text too large to prepare. The order of documents is a function of the seed
and the epoch: that of the source's parts is shuffled, and then each window of `shuffle_buffer`
documents. The position is some integers: a restart reads the window again. The order depends on the
number of hosts, and batches have no random access. Packing is concat-and-split with the pairs of
`moelib.data.batches.packing`; the sequences of a long document follow one another.

Letters: B sequences of this host's batch, S sequence length.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moelib.core.config import REQUIRED, config_class
from moelib.core.config_types import PositiveInt
from moelib.core.errors import UserError
from moelib.data.batches.fill import fill_pieces
from moelib.data.batches.input import (
    BatchIterator,
    Input,
    State,
    check_rows,
    check_state,
    empty_batch,
)
from moelib.data.batches.packing import DocumentBoundary, Packing, make_plan
from moelib.data.hashing import random_permutation
from moelib.data.sources.files import text_pieces
from moelib.data.sources.source import BadRecordError, BadRecords, Part, Source, fingerprint
from moelib.data.tokens.token_source import TokenSource
from moelib.data.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from moelib.core.tree import Batch

_DOCUMENTS_AT_ONCE = 32  # Tokenized together.

# A document: where its window begins (bad records are those before the part), its number in the
# shuffled order of the window, and the number of its tokens that are in batches.
_START = {"epoch": 0, "window": 0, "part": 0, "record": 0, "bad_records": 0, "document": 0}
_START["token"] = 0


class StreamingInput(Input):
    """Batches of documents that are tokenized as they are read, epoch after epoch."""

    is_endless = True

    @config_class
    class Config(Input.Config):
        source: Source.Config = REQUIRED  # The documents.
        tokenizer: Tokenizer.Config = REQUIRED  # Encodes the documents.
        # Segments, positions and targets where one document follows another.
        document_boundary: DocumentBoundary = DocumentBoundary.RESET
        prepend_bos: bool = False  # Whether each document begins with the tokenizer's BOS.
        seed: int = 0  # Of the order of documents.
        # Documents that are shuffled among themselves; 1 keeps the order of the source.
        shuffle_buffer: PositiveInt = 1024
        max_bad_records: int = 0  # Records without a document to skip; one more is an error.
        vocab_size: int | None = None  # The model's; a tokenizer with a larger one is refused.

    def __init__(self, cfg: Config) -> None:
        """Lists the source and loads the tokenizer; reads no text.

        Raises UserError if the vocabulary is too large, or there is no BOS to prepend.
        """
        super().__init__(cfg)
        cfg = self.config
        self.tokenizer: Any = cfg.tokenizer.instantiate()
        if cfg.prepend_bos and self.tokenizer.bos_id is None:
            raise UserError(
                "prepend_bos=True: the tokenizer has no BOS; set its bos_token to one, or "
                "prepend_bos=False."
            )
        self.parts: Sequence[Part] = cfg.source.instantiate().parts()
        if cfg.vocab_size is not None and self.tokenizer.vocab_size > cfg.vocab_size:
            raise UserError(
                f"vocab_size={cfg.vocab_size}: the tokenizer has {self.tokenizer.vocab_size} "
                "tokens; set the model's vocab_size to at least that."
            )

    @classmethod
    def load_tokenizer(cls, cfg: Any) -> Tokenizer:
        """Returns the tokenizer of the config."""
        return cfg.tokenizer.instantiate()

    def iterator(self, rows: range | None = None) -> "StreamingIterator":
        """Returns a host's batches, without end."""
        return StreamingIterator(self, check_rows(rows, self.config.global_batch_size))

    def identity_of_host(self, rows: range) -> State:
        """Returns the settings and data that determine a host's batches, as JSON values."""
        cfg = self.config
        return {
            "source": fingerprint(self.parts),
            "tokenizer": self.tokenizer.fingerprint,
            "seq_len": cfg.seq_len,
            "global_batch_size": cfg.global_batch_size,
            "document_boundary": cfg.document_boundary.value,
            "prepend_bos": cfg.prepend_bos,
            "seed": cfg.seed,
            "shuffle_buffer": cfg.shuffle_buffer,
            "rows": [rows.start, rows.stop],
        }


def _stream_of(identity: State) -> State:
    """Returns what determines the tokens of a host and their order, of its identity."""
    rows = identity.get("rows", [0, 1])
    share = (
        rows[0] / (rows[1] - rows[0]),
        identity.get("global_batch_size", 0) / (rows[1] - rows[0]),
    )
    sizes = ("seq_len", "global_batch_size", "document_boundary", "rows")
    return {name: x for name, x in identity.items() if name not in sizes} | {"share": share}


class StreamingIterator(BatchIterator):
    """One host's batches. Its state belongs to this host, and to this number of hosts."""

    def __init__(self, owner: StreamingInput, rows: range) -> None:
        self._owner, self._num_rows = owner, len(rows)
        self._host_index = rows.start // len(rows)
        self._num_hosts = owner.config.global_batch_size // len(rows)
        self._identity = owner.identity_of_host(rows)
        self.step = 0
        self._go_to(_START)

    def _go_to(self, position: State) -> None:
        self._begin = position
        self._bad_records = BadRecords(position["bad_records"])
        self._documents = self._documents_from(position)
        self._pending = _PendingDocuments(self._owner.tokenizer, self._owner.config.prepend_bos)
        if position["token"]:
            self._read_documents()
            self._pending.drop(position["token"])

    @property
    def num_bad_records(self) -> int:
        """Records without a document that were skipped."""
        return self._bad_records.count

    def __next__(self) -> "Batch":
        """Returns this host's sequences of the next batch.

        Raises:
            BadRecordError: At a record without a document, beyond `max_bad_records`.
            UserError: If there is no text at all.
        """
        cfg = self._owner.config
        while self._pending.num_pairs(cfg.document_boundary) < self._num_rows * cfg.seq_len:
            self._read_documents()
        self.step += 1
        return self._pending.take(self._num_rows, cfg.seq_len, cfg.document_boundary)

    def _read_documents(self) -> None:
        """Reads and tokenizes some documents."""
        self._pending.add(list(itertools.islice(self._documents, _DOCUMENTS_AT_ONCE)))

    def _documents_from(self, position: State) -> Iterator[tuple[State, str]]:
        """Yields (position, text) of the documents that are not empty, from a position on."""
        cfg = self._owner.config
        at = dict(position)
        while True:
            num_read, has_text, is_whole = 0, False, at["part"] == at["record"] == 0
            reader = self._records(at["epoch"], at["part"], at["record"])
            while window := list(itertools.islice(reader, cfg.shuffle_buffer)):
                num_read += len(window)
                at |= window[0][0]
                order = random_permutation(len(window), cfg.seed, at["epoch"], at["window"])
                for number in range(at["document"], len(window)):
                    if text := window[order[number]][1]:
                        has_text = True
                        yield {**at, "document": number}, text
                at |= {"window": at["window"] + 1, "document": 0}
            if is_whole and not has_text:
                raise UserError(
                    f"The stream has no text in {num_read} records; set source to one with text."
                )
            at = {**_START, "epoch": at["epoch"] + 1, "bad_records": self.num_bad_records}

    def _records(self, epoch: int, part: int, record: int) -> Iterator[tuple[State, str]]:
        """Yields ({"part", "record", "bad_records"}, text) of this host's documents of an epoch."""
        cfg, parts, hosts = self._owner.config, self._owner.parts, self._num_hosts
        shares_parts = len(parts) >= hosts
        mine = list(parts[self._host_index :: hosts] if shares_parts else parts)
        order = np.arange(len(mine))
        if cfg.shuffle_buffer > 1:
            order = random_permutation(len(mine), cfg.seed, epoch)
        for i in range(part, len(mine)):
            start = {"part": i, "bad_records": self.num_bad_records}
            for number, text in enumerate(self._texts(mine[order[i]])):
                skipped = i == part and number < record
                if not skipped and (shares_parts or number % hosts == self._host_index):
                    yield {**start, "record": number}, text

    def _texts(self, part: Part) -> Iterator[str]:
        """Yields the documents of a part. Raises BadRecordError beyond `max_bad_records`."""
        most = self._owner.config.max_bad_records
        bad = self._bad_records if most else None
        try:
            for text in part.documents(bad):
                if bad is not None and bad.count > most:
                    raise BadRecordError(bad.first)
                yield from text_pieces(text)
        except BadRecordError as error:
            raise BadRecordError(
                f"{error}; correct it, or set max_bad_records={most} larger to skip such records."
            ) from None

    def state(self) -> State:
        """Returns the position of the first token that is in no batch."""
        position = self._pending.first_position or self._begin
        return {"step": self.step, "position": position, "input": self._identity}

    def restore(self, state: State) -> None:
        """Goes to a position.

        Raises UserError if the saved input had other batches, or was another host's.
        """
        check_state(state, self._identity)
        self._go_to(state["position"])
        self.step = state["step"]

    def follow(self, state: State) -> None:
        """Goes on in the same stream, whatever the sizes of batches before; else to its begin."""
        self.step = state.get("step", 0)
        if _stream_of(state.get("input") or {}) == _stream_of(self._identity):
            self.restore({**state, "input": self._identity})


class _PendingDocuments(TokenSource):
    """Tokenized documents that are not, or not entirely, in a batch yet."""

    def __init__(self, tokenizer: Tokenizer, prepend_bos: bool) -> None:
        super().__init__(type(self).default_config())
        self._tokenizer = tokenizer
        self._begin = [tokenizer.bos_id] if prepend_bos else []
        self.name = "stream"
        self.vocab_size, self.eos_id = tokenizer.vocab_size, tokenizer.eos_id
        self.token_num_bytes = tokenizer.token_num_bytes()
        self._positions: list[State] = []
        self._dropped = 0  # Tokens of the first document that are in earlier batches.
        self._hold(np.empty(0, np.int32), [])

    def _hold(self, tokens: npt.NDArray[np.int32], lengths: Sequence[int]) -> None:
        self._tokens, self.lengths = tokens, np.array(lengths, np.int64)
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.file_starts = np.array([0, len(tokens)], np.int64)

    @property
    def first_position(self) -> State | None:
        """Position of the first token; None before the first document."""
        return {**self._positions[0], "token": self._dropped} if self._positions else None

    def file(self, index: int) -> npt.NDArray[np.int32]:
        """Returns all tokens."""
        del index
        return self._tokens

    def add(self, documents: Sequence[tuple[State, str]]) -> None:
        """Appends documents with their positions, each between BOS, if chosen, and end of text."""
        positions, texts = zip(*documents, strict=True)
        ids = self._tokenizer.encode_batch(texts)
        new = [np.array([*self._begin, *each, self.eos_id], np.int32) for each in ids]
        self._positions += positions
        self._hold(np.concatenate([self._tokens, *new]), [*self.lengths, *map(len, new)])

    def drop(self, num_tokens: int) -> None:
        """Removes tokens from the front."""
        left = self.starts + self.lengths - num_tokens
        first = int(np.argmax(left > 0))  # The first document of which tokens are left.
        dropped = num_tokens - int(self.starts[first])
        self._dropped = dropped + (self._dropped if first == 0 else 0)
        del self._positions[:first]
        self._hold(self._tokens[num_tokens:], np.minimum(left, self.lengths)[first:].tolist())

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
        self.drop(int(pieces.next_token[-1]))  # The next sequence begins with the last target.
        return batch
