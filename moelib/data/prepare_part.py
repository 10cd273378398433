"""Tokenizing one part of a source into one file of a token store: the work of a worker process."""

import contextlib
import dataclasses
import errno
import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from moelib.core.errors import UserError
from moelib.core.files import read_json, write_json
from moelib.data import token_store
from moelib.data.source import BadRecordError, BadRecords, Part, TextHash
from moelib.data.token_source import check_vocabulary
from moelib.data.tokenizer import Tokenizer

PARTS = "parts"  # Folder of the results of finished parts; a finished store does not have it.
_BATCH_CHARACTERS = 1 << 20  # Text that is tokenized at a time.
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
    text_sha256: str = ""  # See `TextHash`; empty in a part that an older version finished.


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
    lengths: list[int] = []
    sizes: list[int] = []
    num_empty, digest, text_hash = 0, hashlib.sha256(), TextHash()
    path = os.path.join(folder, token_store.tokens_file(index))
    with _named_errors(folder, part):
        with open(path, "wb") as file:
            for texts in _batches(documents):
                kept = [text for text in texts if text]
                num_empty += len(texts) - len(kept)
                ids = [document + end for document in tokenizer.encode_batch(kept)]
                lengths += map(len, ids)
                for data in map(str.encode, kept):
                    sizes.append(len(data))
                    text_hash.add(data)
                tokens = np.fromiter(itertools.chain.from_iterable(ids), np.int64)
                check_vocabulary(tokens, tokenizer.vocab_size, part.name)
                written = tokens.astype(dtype).tobytes()
                digest.update(written)
                file.write(written)
        result = PartResult(
            num_tokens=sum(lengths),
            num_documents=len(lengths),
            num_bytes=sum(sizes),
            num_empty=num_empty,
            num_bad_records=bad_records.count,
            first_bad_record=bad_records.first,
            sha256=digest.hexdigest(),
            text_sha256=text_hash.hexdigest(),
        )
        for name, values in ((token_store.LENGTHS, lengths), (token_store.NUM_BYTES, sizes)):
            np.save(part_file(folder, index, name), np.array(values, np.uint32))
        write_json(part_file(folder, index, "json"), result._asdict())


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


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Yields the documents in lists of about `_BATCH_CHARACTERS` characters."""
    batch: list[str] = []
    size = 0
    for text in documents:
        batch.append(text)
        size += len(text)
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
