"""Tokenizing one part of a source into one file of a token store: the work of a worker process."""

import array
import collections
import contextlib
import dataclasses
import errno
import hashlib
import itertools
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

import numpy as np

from moelib.core.errors import UserError
from moelib.data.sources.files import check_unchanged, text_pieces
from moelib.data.sources.source import BadRecordError, BadRecords, Part, records_of
from moelib.data.tokens import token_store
from moelib.data.tokens.chat.conversation import RecordError
from moelib.data.tokens.chat.labels import ChatEncoder, ChatOptions, Example, bounds_of
from moelib.data.tokens.store_check import hash_blocks
from moelib.data.tokens.token_source import check_vocabulary
from moelib.data.tokens.token_store import json_digest
from moelib.data.tokens.tokenizer import Tokenizer
from moelib.runtime.storage import read_json, write_json, writing

logger = logging.getLogger(__name__)

BATCH_CHARACTERS = 1 << 17  # Characters of documents that are encoded together.
PARTS = "parts"  # Folder of the results of finished parts; a finished store does not have it.
_CURE = (
    "correct it, or set skip_bad_records (--skip_bad_lines), which skips and counts such records."
)


class DiskFullError(OSError, UserError):
    """The disk is full, or too small for a token store."""


@dataclasses.dataclass(frozen=True)
class PartOptions:
    """Settings that decide a part's tokens, in addition to its documents and the tokenizer."""

    append_eos: bool
    skip_bad_records: bool
    prepend_bos: bool = False
    chat: ChatOptions | None = None  # Of conversations; None for text.


class PartResult(NamedTuple):
    """Counts and hashes of a finished part."""

    num_tokens: int
    num_documents: int
    num_bytes: int
    num_empty: int
    num_bad_records: int
    first_bad_record: str
    num_divided: int  # Long documents that are several here; see `text_pieces`.
    sha256: str  # Of the tokens.
    block_hashes: Mapping[str, Sequence[str]]  # Of the part's files, by path in the store.
    lost_characters: Mapping[str, int]  # See `Tokenizer.lost_characters`.
    num_labels: int = 0  # Tokens of conversations that are labels.
    # Records without an example, by reason, and conversations that were cut.
    left_out: Mapping[str, int] = {}
    num_cut: int = 0


def tokenize_part(
    folder: str, index: int, part: Part, tokenizer: Tokenizer, options: PartOptions
) -> PartResult:
    """Writes a part's tokens and its documents' lengths and bytes, and its result last.

    Returns the result.

    Raises:
        BadRecordError: At a record without a document, unless such records are skipped.
        DiskFullError: If the disk is full; the part then counts as unfinished.
        UserError: If the part is damaged, a file of it is written to meanwhile, or the tokenizer
            gives an id beyond its vocabulary.
    """
    bad_records = BadRecords()
    counter = bad_records if options.skip_bad_records else None
    divided: list[int] = []
    dtype = np.dtype(token_store.token_dtype(tokenizer.vocab_size)).newbyteorder("<")
    begin = [tokenizer.bos_id] if options.prepend_bos else []
    end = [tokenizer.eos_id] if options.append_eos else []
    lengths, sizes = array.array("I"), array.array("I")
    num_empty, digest = 0, hashlib.sha256()
    lost: collections.Counter[str] = collections.Counter()
    path = os.path.join(folder, token_store.tokens_file(index))
    chat = None if options.chat is None else _Chat(options.chat, tokenizer)

    with _named_errors(folder, part):
        with synced_file(path) as file:
            for batch in _encoded(part, tokenizer, counter, divided, chat):
                texts = [text for text, _ in batch if text]
                encoded = [ids for text, ids in batch if text]
                num_empty += len(batch) - len(texts)
                lost += tokenizer.lost_characters(texts, encoded)
                ids = [begin + document + end for document in encoded]
                lengths.extend(map(len, ids))
                tokens = np.array(list(itertools.chain.from_iterable(ids)), np.int64)
                check_vocabulary(tokens, tokenizer.vocab_size, part.name)
                written = tokens.astype(dtype).tobytes()
                digest.update(written)
                file.write(written)
                sizes.extend(len(text.encode()) for text in texts)
        check_unchanged(part)
        arrays: dict[str, Any] = {
            token_store.LENGTHS: np.array(lengths, np.uint32),
            token_store.NUM_BYTES: np.array(sizes, np.uint32),
        }
        if chat is not None:
            arrays[token_store.LABELS] = np.array(chat.bounds, np.uint64)
            arrays[token_store.FIRST_OF_RECORD] = np.array(chat.is_first, np.uint8)
        for name, values in arrays.items():
            with synced_file(part_file(folder, index, name)) as file:
                np.save(file, values)
        result = PartResult(
            num_tokens=sum(lengths),
            num_documents=len(lengths),
            num_bytes=sum(sizes),
            num_empty=num_empty,
            num_bad_records=bad_records.count,
            first_bad_record=bad_records.first,
            num_divided=len(divided),
            sha256=digest.hexdigest(),
            block_hashes=_block_hashes(folder, index),
            lost_characters=lost,
            **({} if chat is None else chat.counts(bad_records)),
        )
        found = result._asdict()
        write_json(part_file(folder, index, "json"), found | {"digest": json_digest(found)})
    return result


def _encoded(
    part: Part,
    tokenizer: Tokenizer,
    counter: BadRecords | None,
    divided: list[int],
    chat: "_Chat | None",
) -> Iterator[list[tuple[str, list[int]]]]:
    """Yields the texts of a part with their token ids, many at a time."""
    if chat is None:
        for texts in _batches(_pieces(part.documents(counter), divided)):
            encoded = iter(tokenizer.encode_batch([text for text in texts if text]))
            yield [(text, next(encoded) if text else []) for text in texts]
        return
    for examples in records_of(part, chat.examples, counter):
        yield [(example.text, example.ids) for example in examples]


class _Chat:
    """The conversations of a part: their tokens, the bounds of their labels, and counts."""

    def __init__(self, options: ChatOptions, tokenizer: Tokenizer) -> None:
        self._encoder = ChatEncoder(options, tokenizer)
        self.bounds, self.is_first = array.array("Q"), array.array("B")
        self._num_tokens = self._num_labels = self._num_cut = 0
        self._left_out: collections.Counter[str] = collections.Counter()

    def examples(self, record: Mapping[str, Any]) -> list[Example]:
        """Returns the examples of a record; none of one that is of no use."""
        try:
            examples = self._encoder.examples(record)
        except RecordError as error:
            if error.is_fault:
                raise
            self._left_out[error.reason] += 1
            return []
        self.bounds.extend(bounds_of(examples, self._num_tokens))
        self.is_first.extend(i == 0 for i in range(len(examples)))
        self._num_tokens += sum(len(example.ids) for example in examples)
        self._num_labels += sum(int(example.is_label.sum()) for example in examples)
        self._num_cut += sum(example.was_cut for example in examples)
        return examples

    def counts(self, bad_records: BadRecords) -> dict[str, Any]:
        """Returns fields of the result of a part."""
        counts = {"num_labels": self._num_labels, "num_cut": self._num_cut}
        return counts | {"left_out": dict(self._left_out + bad_records.reasons)}


@contextlib.contextmanager
def synced_file(path: str) -> Iterator[IO[bytes]]:
    """Opens a file for writing, and syncs it to disk when the block ends."""
    with writing(path), open(path, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _named_errors(folder: str, part: Part) -> Iterator[None]:
    """Adds the cure to errors."""
    try:
        yield
    except BadRecordError as error:
        raise BadRecordError(f"{error}; {_CURE}") from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise DiskFullError(
            errno.ENOSPC,
            f"the disk is full while writing the tokens of {part.name}; finished parts are kept: "
            "free space and run the same command again, or set output_dir to a larger disk",
            folder,
        ) from error


def _pieces(documents: Iterable[str], divided: list[int]) -> Iterator[str]:
    """Yields documents, long ones in pieces; appends their numbers of pieces to `divided`."""
    for document in documents:
        num_pieces = 0
        for piece in text_pieces(document):
            num_pieces += 1
            yield piece
        if num_pieces > 1:
            divided.append(num_pieces)


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Yields the documents in lists of some `BATCH_CHARACTERS`."""
    batch: list[str] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def part_file(folder: str, index: int, ending: str) -> str:
    """Returns the path of a file of a part in an unfinished store."""
    return os.path.join(folder, PARTS, f"{index:05d}.{ending}")


def _block_hashes(folder: str, index: int, *, of_tokens: bool = True) -> dict[str, list[str]]:
    arrays = token_store.LENGTHS, token_store.NUM_BYTES, *token_store.OF_CHAT
    names = [part_file("", index, name) for name in arrays]
    names = [name for name in names if os.path.exists(os.path.join(folder, name))]
    names += [token_store.tokens_file(index)] * of_tokens
    return {name: hash_blocks(os.path.join(folder, name)) for name in names}


def read_result(
    folder: str, index: int, options: PartOptions, *, read_tokens: bool = True
) -> PartResult | None:
    """Returns the result of a part, or None if it must be tokenized.

    That is so if it is not finished, a file has changed since, or it lacks records that these
    options may not skip. Without `read_tokens`, the file of tokens is not checked.
    """
    path = part_file(folder, index, "json")
    if not os.path.exists(path):
        return None
    with contextlib.suppress(OSError, UserError, TypeError):
        found = read_json(path)
        if found.pop("digest", None) == json_digest(found):
            result = PartResult(**found)  # TypeError: of another version.
            hashes = _block_hashes(folder, index, of_tokens=read_tokens)
            if dict(result.block_hashes) == {**result.block_hashes, **hashes}:
                may_skip = options.skip_bad_records or not result.num_bad_records
                return result if may_skip else None
    logger.warning("%s or its part's files are damaged; the part is tokenized again.", path)
    return None
