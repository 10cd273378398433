"""Tokenizing one part of a source into one file of a token store: the work of a worker process."""

import array
import contextlib
import dataclasses
import errno
import hashlib
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, NamedTuple

import numpy as np

from moelib.core.errors import UserError
from moelib.core.files import read_json, write_json
from moelib.core.progress import format_bytes
from moelib.data import token_store
from moelib.data.document_pieces import PIECE_CHARACTERS
from moelib.data.source import BadRecordError, BadRecords, Part, TextHash
from moelib.data.store_check import hash_blocks
from moelib.data.token_source import check_vocabulary
from moelib.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

PARTS = "parts"  # Folder of the results of finished parts; a finished store does not have it.
_BATCH_CHARACTERS = 1 << 17  # Text that is tokenized at a time.
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


class PartResult(NamedTuple):
    """Counts and hashes of a finished part."""

    num_tokens: int
    num_documents: int
    num_bytes: int
    num_empty: int
    num_bad_records: int
    first_bad_record: str
    sha256: str  # Of the tokens.
    # Empty in a part that an older version finished:
    text_sha256: str = ""  # See `TextHash`.
    block_hashes: Sequence[str] = ()  # Of the file of tokens.


def tokenize_part(
    folder: str, index: int, part: Part, tokenizer: Tokenizer, options: PartOptions
) -> None:
    """Writes a part's tokens and its documents' lengths and bytes, and its result last.

    Raises:
        BadRecordError: At a record without a document, unless such records are skipped.
        DiskFullError: If the disk is full; the part then counts as unfinished.
        UserError: If the part is damaged, or the tokenizer gives an id beyond its vocabulary.
    """
    bad_records = BadRecords()
    documents = part.documents(bad_records if options.skip_bad_records else None)
    dtype = np.dtype(token_store.token_dtype(tokenizer.vocab_size)).newbyteorder("<")
    end = [tokenizer.eos_id] if options.append_eos else []
    pieces = _Pieces(documents, tokenizer, part.name)
    lengths, length, digest = array.array("I"), 0, hashlib.sha256()
    path = os.path.join(folder, token_store.tokens_file(index))
    with _named_errors(folder, part):
        with synced_file(path) as file:
            for batch in _batches(pieces):
                encoded = iter(tokenizer.encode_batch([text for text in batch if text is not None]))
                ids: list[int] = []
                for text in batch:
                    added = end if text is None else next(encoded)
                    ids += added
                    length += len(added)
                    if text is None:
                        lengths.append(length)
                        length = 0
                tokens = np.array(ids, np.int64)
                check_vocabulary(tokens, tokenizer.vocab_size, part.name)
                written = tokens.astype(dtype).tobytes()
                digest.update(written)
                file.write(written)
        result = PartResult(
            num_tokens=sum(lengths),
            num_documents=len(lengths),
            num_bytes=sum(pieces.sizes),
            num_empty=pieces.num_empty,
            num_bad_records=bad_records.count,
            first_bad_record=bad_records.first,
            sha256=digest.hexdigest(),
            text_sha256=pieces.text_hash.hexdigest(),
            block_hashes=hash_blocks(path),
        )
        for name, values in ((token_store.LENGTHS, lengths), (token_store.NUM_BYTES, pieces.sizes)):
            with synced_file(part_file(folder, index, name)) as file:
                np.save(file, np.array(values, np.uint32))
        write_json(part_file(folder, index, "json"), result._asdict())


class _Pieces:
    """The documents of a part as texts to encode, with None after the last text of each."""

    def __init__(self, documents: Iterable[str], tokenizer: Tokenizer, name: str) -> None:
        self._documents, self._tokenizer, self._name = documents, tokenizer, name
        self.sizes, self.num_empty, self.text_hash = array.array("I"), 0, TextHash()

    def __iter__(self) -> Iterator[str | None]:
        largest = 4 * PIECE_CHARACTERS
        for document in self._documents:
            if not document:
                self.num_empty += 1
                continue
            data = document.encode()
            self.sizes.append(len(data))
            self.text_hash.add(data)
            del data
            for text in self._tokenizer.pieces(document):
                if len(text) > largest:
                    logger.warning(
                        "%s: %d characters are encoded at once, in some %s of memory, because the "
                        "tokenizer separates no words in them.",
                        self._name,
                        largest := len(text),
                        format_bytes(200 * len(text)),
                    )
                yield text
            yield None


@contextlib.contextmanager
def synced_file(path: str) -> Iterator[IO[bytes]]:
    """Opens a file for writing, and syncs it to disk when the block ends."""
    with open(path, "wb") as file:
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


def _batches(pieces: Iterable[str | None]) -> Iterator[list[str | None]]:
    """Yields the pieces in lists of some `_BATCH_CHARACTERS` characters."""
    batch: list[str | None] = []
    size = 0
    for text in pieces:
        batch.append(text)
        size += len(text or "")
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def part_file(folder: str, index: int, ending: str) -> str:
    """Returns the path of a file of a part in an unfinished store."""
    return os.path.join(folder, PARTS, f"{index:05d}.{ending}")


def read_result(folder: str, index: int) -> PartResult | None:
    """Returns the result of a part, or None if it is not finished."""
    found = read_json(part_file(folder, index, "json"))
    return PartResult(**found) if found else None


def check_no_bad_records(results: Iterable[PartResult | None]) -> None:
    """Raises BadRecordError if a part was finished with records skipped."""
    for result in results:
        if result is not None and result.num_bad_records:
            raise BadRecordError(f"{result.first_bad_record}; {_CURE}")
