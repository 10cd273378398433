"""Sources of documents: the contract, and documents held in memory.

A source is a list of parts. A part is small plain data that can be sent to a worker process and
that reads its documents in a fixed order; a source's order is that of its parts. The parts depend
on the data alone, never on the number of processes that read them.
"""

import collections
import dataclasses
import hashlib
import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from moelib.core.config import REQUIRED, Configurable, config_class
from moelib.core.errors import UserError

_TEXTS_PER_PART = 64


class BadRecordError(UserError):
    """A record without a document, such as a broken line of JSON."""

    reason = "bad records"  # Words that stand for errors of one kind in counts.

    def because(self, reason: str) -> "BadRecordError":
        """Sets the reason. Returns itself."""
        self.reason = reason
        return self

    def at(self, where: str) -> "BadRecordError":
        """Returns the error with the place of the record."""
        return BadRecordError(f"{where}: {self}").because(self.reason)


@dataclasses.dataclass
class BadRecords:
    """The numbers of records that were skipped, in all and by reason, and the first error."""

    count: int = 0
    first: str = ""
    reasons: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def add(self, error: BadRecordError) -> None:
        """Counts a record."""
        self.first = self.first or str(error)
        self.count += 1
        self.reasons[error.reason] += 1


class Part(Protocol):
    """A piece of a source: any frozen dataclass of plain values with these members.

    Its fields identify the documents, except those with `dataclasses.field(compare=False)`.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str:
        """The name in messages, usually a file."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of text, exact or estimated: for progress and the check of free disk space."""
        ...

    def documents(self, bad_records: BadRecords | None = None) -> Iterator[str]:
        """Yields the documents in order, empty ones included.

        Args:
            bad_records: Counter of records without a document; None makes such a record an error.

        Raises:
            BadRecordError: At a record without a document, if `bad_records` is None.
            OSError: If the data cannot be read.
            UserError: If the data are not of the expected kind (not UTF-8, no such column).
        """
        ...


class RecordPart(Part, Protocol):
    """A part of records with named fields, such as lines of JSON or rows of a table."""

    def records[T](
        self, read: Callable[[Mapping[str, Any]], T], bad_records: BadRecords | None = None
    ) -> Iterator[T]:
        """Yields what `read` returns of each record in order; see `documents` for errors.

        Args:
            read: A function of a record's fields by name, which may raise BadRecordError; the place
                of the record is then added.
            bad_records: Counter of bad records; None makes such a record an error.
        """
        ...


def records_of[T](
    part: Part, read: Callable[[Mapping[str, Any]], T], bad_records: BadRecords | None = None
) -> Iterator[T]:
    """Yields what `read` returns of each record of a part; see `RecordPart.records`.

    Raises:
        UserError: If the part has no records.
    """
    if (records := getattr(part, "records", None)) is None:
        raise UserError(
            f"{part.name} holds no records; use JSON lines, Parquet, Arrow, CSV or TSV."
        )
    return records(read, bad_records)


def record_as_text(record: Mapping[str, Any]) -> str:
    """Returns a whole record as a document: JSON."""
    return json.dumps(record, ensure_ascii=False, default=str)


class Source(Configurable):
    """Documents to train on, in a fixed order, from any number of files."""

    @config_class
    class Config(Configurable.Config):
        pass

    @abstractmethod
    def parts(self) -> Sequence[Part]:
        """Returns the parts, at least one. Raises UserError if there is nothing to read."""

    def documents(self, bad_records: BadRecords | None = None) -> Iterator[str]:
        """Yields all documents, part after part. See `Part.documents`."""
        for part in self.parts():
            yield from part.documents(bad_records)


def fingerprint(parts: Sequence[Part]) -> str:
    """Returns a hash of the parts: of files, their relative paths, sizes and samples.

    A copy of a corpus has the same fingerprint. So has a text that was changed in the middle of a
    large file, or in one of many files, without changing its size.
    """
    described = [[type(part).__name__, _compared(part)] for part in parts]
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _compared(value: Any) -> Any:
    """Returns the values of a part on which its equality depends, as JSON values."""
    if isinstance(value, tuple):
        return [_compared(each) for each in value]
    if not dataclasses.is_dataclass(value):
        return value
    fields = dataclasses.fields(value)
    return {field.name: _compared(getattr(value, field.name)) for field in fields if field.compare}


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
        texts: Sequence[str] = REQUIRED  # One per document.

    def parts(self) -> Sequence[Part]:
        """Returns the texts in groups."""
        texts, size = tuple(self.config.texts), _TEXTS_PER_PART
        if not texts:
            raise UserError("InMemorySource has no documents; set texts to at least one.")
        return [TextsPart(texts[i : i + size]) for i in range(0, len(texts), size)]
