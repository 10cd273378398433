"""Sources of documents: the contract, and documents that are already in memory.

A source is a list of parts. A part is small plain data that a worker process can be sent, and that
reads its documents in a stable order; the source's order is that of its parts. What the parts are
depends on the data alone, never on how many processes read them.
"""

import dataclasses
import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Protocol

from moelib.core.config import REQUIRED, Configurable, config_class
from moelib.data.hashing import random_permutation


class BadRecordError(ValueError):
    """A record that holds no document, such as a broken line of JSON."""


@dataclasses.dataclass
class BadRecords:
    """Counts records that were skipped, and keeps the reason of the first."""

    count: int = 0
    first: str = ""

    def add(self, error: BadRecordError) -> None:
        """Counts a record."""
        self.first = self.first or str(error)
        self.count += 1


class Part(Protocol):
    """A piece of a source: any frozen dataclass of plain values that has these."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str:
        """What messages call it, usually its file."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of text: exact or an estimate, for progress and the check of disk space."""
        ...

    def documents(self, bad_records: BadRecords | None = None) -> Iterator[str]:
        """Yields the documents in their order, empty ones included.

        Args:
            bad_records: Where records without a document are counted; None makes them errors.

        Raises:
            BadRecordError: At such a record, with its place, if `bad_records` is None.
            OSError: If the data cannot be read.
            ValueError: If it is not what it should be (not UTF-8, not compressed, no such column).
        """
        ...


def fingerprint(parts: Sequence[Part]) -> str:
    """Returns a hash of what parts are made of; another one means other documents."""
    described = [[type(part).__name__, dataclasses.asdict(part)] for part in parts]
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


class Source(Configurable):
    """Documents to train on, in a stable order, from any number of files."""

    @config_class
    class Config(Configurable.Config):
        pass

    @abstractmethod
    def parts(self) -> Sequence[Part]:
        """Returns the parts, at least one. Raises ValueError if there is nothing to read."""

    def documents(self, bad_records: BadRecords | None = None) -> Iterator[str]:
        """Yields all documents, part after part. See `Part.documents`."""
        for part in self.parts():
            yield from part.documents(bad_records)


@dataclasses.dataclass(frozen=True)
class TextsPart:
    """Documents held in memory."""

    texts: tuple[str, ...]
    name: str = "documents in memory"

    @property
    def num_bytes(self) -> int:
        """Bytes of all texts in UTF-8."""
        return sum(len(text.encode()) for text in self.texts)

    def documents(self, bad_records: BadRecords | None = None) -> Iterator[str]:
        """Yields the texts."""
        del bad_records
        yield from self.texts


class InMemorySource(Source):
    """Documents given in the config: for tests and examples."""

    @config_class
    class Config(Source.Config):
        texts: Sequence[str] = REQUIRED
        documents_per_part: int = 64

    def parts(self) -> Sequence[Part]:
        """Returns the texts in groups."""
        texts, size = tuple(self.config.texts), self.config.documents_per_part
        if not texts:
            raise ValueError("InMemorySource has no documents; set texts to at least one.")
        return [TextsPart(texts[i : i + size]) for i in range(0, len(texts), size)]


def spread(texts: Iterable[str], share: float) -> Iterator[str]:
    """Yields about such a share (0 to 1) of all text, evenly spread over it."""
    seen = taken = 0
    for text in texts:
        seen += len(text)
        if taken <= share * seen:
            taken += len(text)
            yield text


def sample_documents(source: Source, num_bytes: int, seed: int = 0) -> Iterator[str]:
    """Yields some documents from all over a source: to train a tokenizer on.

    Args:
        source: The documents; records without one are passed over.
        num_bytes: UTF-8 bytes of text to yield, give or take a document.
        seed: Decides which parts come first, if there are more than are needed.
    """
    parts = source.parts()
    share = max(num_bytes // len(parts), num_bytes // 64, 1)  # Of a part.
    for index in random_permutation(len(parts), seed).tolist():
        left = min(share, num_bytes)
        for text in parts[index].documents(BadRecords()):
            if left <= 0:
                break
            yield text
            left -= len(text.encode())
            num_bytes -= len(text.encode())
        if num_bytes <= 0:
            return
