"""Tokenizing one part of a source into one file of a token store: what a worker process does."""

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from moelib.core.files import write_json
from moelib.data import token_store
from moelib.data.source import BadRecordError, BadRecords, Part
from moelib.data.token_source import check_vocabulary
from moelib.data.tokenizer import Tokenizer

PARTS = "parts"  # The folder of what is known of finished parts; removed from a finished store.
_BATCH_CHARACTERS = 1 << 20  # Text that is tokenized at once.
_MEND = (
    "mend it, or leave such records out with skip_bad_records (--skip_bad_lines), which counts "
    "them."
)


@dataclasses.dataclass(frozen=True)
class PartOptions:
    """What decides the tokens of a part, beside its documents and the tokenizer."""

    append_eos: bool
    skip_bad_records: bool


class PartResult(NamedTuple):
    """What is known of a finished part."""

    num_tokens: int
    num_documents: int
    num_bytes: int
    num_empty: int
    num_bad_records: int
    first_bad_record: str
    sha256: str


def tokenize_part(
    folder: str, index: int, part: Part, tokenizer: Tokenizer, options: PartOptions
) -> None:
    """Writes a part's tokens, its documents' lengths and bytes, and last what is known of it.

    Raises:
        BadRecordError: At a record that holds no document, unless such are skipped.
        OSError: If the disk is full; no file of the part then counts as finished.
        ValueError: If the part is broken, or the tokenizer gives an id beyond its vocabulary.
    """
    bad_records = BadRecords()
    documents = part.documents(bad_records if options.skip_bad_records else None)
    dtype = np.dtype(token_store.token_dtype(tokenizer.vocab_size)).newbyteorder("<")
    end = [tokenizer.eos_id] if options.append_eos else []
    lengths: list[int] = []
    sizes: list[int] = []
    num_empty, digest = 0, hashlib.sha256()
    with (
        _named_errors(folder, part),
        open(os.path.join(folder, token_store.tokens_file(index)), "wb") as file,
    ):
        for texts in _batches(documents):
            kept = [text for text in texts if text]
            num_empty += len(texts) - len(kept)
            ids = [document + end for document in tokenizer.encode_batch(kept)]
            lengths += map(len, ids)
            sizes += [len(text.encode()) for text in kept]
            tokens = np.fromiter((i for document in ids for i in document), np.int64)
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
    )
    with _named_errors(folder, part):
        np.save(part_file(folder, index, token_store.LENGTHS), np.array(lengths, np.uint32))
        np.save(part_file(folder, index, token_store.NUM_BYTES), np.array(sizes, np.uint32))
        write_json(part_file(folder, index, "json"), result._asdict())


@contextlib.contextmanager
def _named_errors(folder: str, part: Part) -> Iterator[None]:
    """Says in errors what to do about them."""
    try:
        yield
    except BadRecordError as error:
        raise BadRecordError(f"{error}; {_MEND}") from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise OSError(
            errno.ENOSPC,
            f"the disk is full while writing the tokens of {part.name}; finished parts are kept: "
            "free space and run the same again, or set output_dir to a larger disk",
            folder,
        ) from error


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Yields the documents in lists of about `_BATCH_CHARACTERS` of text."""
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
    """Returns the path of a file of a part in a store that is being made."""
    return os.path.join(folder, PARTS, f"{index:05d}.{ending}")


def read_result(folder: str, index: int) -> PartResult | None:
    """Returns what is known of a part, or None if it is not finished."""
    try:
        with open(part_file(folder, index, "json"), encoding="utf-8") as file:
            return PartResult(**json.load(file))
    except FileNotFoundError:
        return None


def check_no_bad_records(results: Iterable[PartResult | None]) -> None:
    """Raises BadRecordError if a part was finished without records that hold no document."""
    for result in results:
        if result is not None and result.num_bad_records:
            raise BadRecordError(f"{result.first_bad_record}; {_MEND}")
