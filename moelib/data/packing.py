"""Packing: which pieces of which documents make up each row, as a pure function of a seed.

What is packed is not tokens but *pairs* (a token, and the next one as its target). A document of n
tokens has n - 1 pairs, because nothing comes after its last token; so an end-of-text token is a
target and no input. Every pair is in exactly one row of every epoch: none is dropped, none is
repeated, and only the last row (concat-and-split) or the ends of rows (best-fit) are padded.

With `DocumentBoundary.CONTINUE` the documents of an epoch are one stream instead, in which the
last token of a document predicts the first of the next: positions and segments know no documents,
as in Megatron-LM without resets (and FLAME-MoE). The stream has one pair less than tokens.

Letters: N documents, R rows of an epoch, S sequence length, P pieces.
"""

import dataclasses
import enum
from abc import abstractmethod

import numpy as np
import numpy.typing as npt

from moelib.data.hashing import random_permutation
from moelib.data.token_source import TokenSource

_Ints = npt.NDArray[np.int64]


class Packing(enum.Enum):
    """How documents become rows."""

    CONCAT_AND_SPLIT = "concat_and_split"  # One after another, cut every S pairs.
    BEST_FIT = "best_fit"  # Whole where they fit (arXiv:2404.10830): fewer cuts, a little padding.


class DocumentBoundary(enum.Enum):
    """What happens between documents in one row."""

    RESET = "reset"  # A segment each, positions from 0, and no target across.
    CONTINUE = "continue"  # One segment a row, positions along the row, targets across.


class LongDocuments(enum.Enum):
    """What happens to a document with more than S pairs."""

    SPLIT = "split"  # Continues in other rows, as a segment of its own, without what was before.
    ERROR = "error"  # Is refused.


@dataclasses.dataclass(frozen=True)
class Pieces:
    """P pieces of documents, in the order of rows and of places in them; no padding."""

    row: _Ints  # [P] which of the asked rows, counted from 0.
    start: _Ints  # [P] global position of the piece's first token.
    length: _Ints  # [P] pairs.
    next_token: _Ints  # [P] global position of the target of the piece's last token.


class EpochPlan:
    """The rows of one epoch."""

    num_rows: int

    @abstractmethod
    def pieces(self, rows: _Ints) -> Pieces:
        """Returns the pieces of rows, each in [0, num_rows)."""


def make_plan(
    source: TokenSource,
    seq_len: int,
    packing: Packing,
    boundary: DocumentBoundary,
    seeds: tuple[int, ...] | None,
) -> EpochPlan:
    """Returns the plan of an epoch.

    Args:
        source: The documents.
        seq_len: Pairs in a row.
        packing: How documents become rows.
        boundary: What happens between documents.
        seeds: What decides the order of documents and rows, usually seed and epoch; None keeps
            the order of the source.

    Raises:
        ValueError: If there is no pair to predict, or best-fit should continue over boundaries.
    """
    if boundary is DocumentBoundary.CONTINUE:
        if packing is not Packing.CONCAT_AND_SPLIT:
            raise ValueError(
                "packing is best_fit, which does not make a stream; set document_boundary to "
                "RESET, or packing to CONCAT_AND_SPLIT."
            )
        return StreamPlan(source, seq_len, seeds)
    if packing is Packing.BEST_FIT:
        return BestFitPlan(source, seq_len, seeds)
    return ConcatPlan(source, seq_len, seeds)


def check_long_documents(source: TokenSource, seq_len: int) -> None:
    """Raises ValueError if a document has more than S pairs."""
    index = int(np.argmax(source.lengths))
    if source.lengths[index] > seq_len + 1:
        raise ValueError(
            f"Document {index} of {source.name} has {source.lengths[index]} tokens, more than a "
            f"row of {seq_len} and its last target; set long_documents to LongDocuments.SPLIT, or "
            f"seq_len to {source.lengths[index] - 1}."
        )


def _nothing_to_predict(source: TokenSource) -> ValueError:
    return ValueError(
        f"{source.name} has {source.num_documents} documents but no token that follows another; "
        "set the source to one with documents of two tokens or more."
    )


# What is shuffled, so that one seed gives each an order of its own.
_DOCUMENTS, _ROWS = 0, 1


def _order(count: int, seeds: tuple[int, ...] | None, use: int) -> _Ints:
    return np.arange(count) if seeds is None else random_permutation(count, *seeds, use)


class ConcatPlan(EpochPlan):
    """Concat-and-split: the pairs of the shuffled documents one after another, S a row.

    Rows are shuffled too, because a long document fills rows that follow one another.
    """

    _min_tokens = 2  # Shorter documents add no pair.

    def __init__(self, source: TokenSource, seq_len: int, seeds: tuple[int, ...] | None) -> None:
        documents = np.flatnonzero(source.lengths >= self._min_tokens)
        self._documents = documents[_order(len(documents), seeds, _DOCUMENTS)]
        self._ends = self._count_pairs(source).cumsum()  # In the epoch's stream of pairs.
        if not len(documents) or not self._ends[-1]:
            raise _nothing_to_predict(source)
        self._starts = source.starts
        self._seq_len = seq_len
        self.num_rows = int(-(-self._ends[-1] // seq_len))
        self._rows = _order(self.num_rows, seeds, _ROWS)

    def _count_pairs(self, source: TokenSource) -> _Ints:
        """Returns the pairs that each of the ordered documents adds to the stream."""
        return source.lengths[self._documents] - 1

    def pieces(self, rows: _Ints) -> Pieces:
        """Returns where the rows' parts of the stream come from."""
        begin = self._rows[rows] * self._seq_len
        end = np.minimum(begin + self._seq_len, self._ends[-1])
        first = np.searchsorted(self._ends, begin, side="right")
        last = np.searchsorted(self._ends, end, side="left")
        row = np.repeat(np.arange(len(rows)), last - first + 1)
        index = np.arange(len(row)) - np.searchsorted(row, row) + first[row]
        document_end = self._ends[index]
        document = self._documents[index]
        document_begin = np.where(index > 0, self._ends[index - 1], 0)
        piece_begin = np.maximum(document_begin, begin[row])
        piece_end = np.minimum(document_end, end[row])
        start = self._starts[document] + piece_begin - document_begin
        next_token = start + (piece_end - piece_begin)
        return Pieces(row, start, piece_end - piece_begin, self._next(index, piece_end, next_token))

    def _next(self, index: _Ints, piece_end: _Ints, inside: _Ints) -> _Ints:
        """Returns the position of each piece's last target, `inside` the document if it can be."""
        del index, piece_end
        return inside


class StreamPlan(ConcatPlan):
    """Concat-and-split of tokens, with targets across documents."""

    _min_tokens = 1

    def _count_pairs(self, source: TokenSource) -> _Ints:
        lengths = source.lengths[self._documents]
        lengths[-1:] -= 1  # Nothing comes after the last token of the epoch.
        return lengths

    def _next(self, index: _Ints, piece_end: _Ints, inside: _Ints) -> _Ints:
        last = len(self._documents) - 1
        across = (piece_end == self._ends[index]) & (index < last)
        following = self._documents[np.minimum(index + 1, last)]
        return np.where(across, self._starts[following], inside)


class BestFitPlan(EpochPlan):
    """Best-fit decreasing: full rows of long documents, and remainders packed together.

    Source: Ding et al., "Fewer Truncations Improve Language Modeling", arXiv:2404.10830. Bins of
    equal free space are alike, so that whole groups are filled at once: the time depends on how
    many different lengths there are (at most S) rather than on how many documents.
    """

    def __init__(self, source: TokenSource, seq_len: int, seeds: tuple[int, ...] | None) -> None:
        pairs = np.maximum(source.lengths - 1, 0)
        num_full, rest = np.divmod(pairs, seq_len)
        full = np.repeat(np.arange(len(pairs)), num_full)
        offset = (np.arange(len(full)) - np.searchsorted(full, full)) * seq_len
        short = np.flatnonzero(rest)
        short = short[_order(len(short), seeds, _DOCUMENTS)]
        short = short[np.argsort(-rest[short], kind="stable")]
        if not len(full) + len(short):
            raise _nothing_to_predict(source)
        bins = best_fit(rest[short], seq_len)
        by_bin = np.argsort(bins, kind="stable")
        documents = short[by_bin]
        # Rows before shuffling: a piece each for full rows, then the bins.
        self._start = np.concatenate(
            [
                source.starts[full] + offset,
                source.starts[documents] + num_full[documents] * seq_len,
            ]
        )
        self._length = np.concatenate([np.full(len(full), seq_len), rest[documents]])
        per_bin = np.bincount(bins)
        per_row = np.concatenate([np.ones(len(full), np.int64), per_bin])
        self._first = np.concatenate([[0], np.cumsum(per_row)])  # First piece of each row.
        self.num_rows = len(per_row)
        self._rows = _order(self.num_rows, seeds, _ROWS)

    def pieces(self, rows: _Ints) -> Pieces:
        """Returns the pieces of bins and full rows."""
        chosen = self._rows[rows]
        first = self._first[chosen]
        row = np.repeat(np.arange(len(rows)), self._first[chosen + 1] - first)
        index = np.arange(len(row)) - np.searchsorted(row, row) + first[row]
        start, length = self._start[index], self._length[index]
        return Pieces(row, start, length, start + length)


def best_fit(lengths: _Ints, capacity: int) -> _Ints:
    """Returns the bin of each item, by best-fit: the fullest bin that still has room.

    Args:
        lengths: Item sizes in decreasing order, each in [1, capacity].
        capacity: Size of a bin.
    """
    bins = np.empty(len(lengths), np.int64)
    free: dict[int, list[npt.NDArray[np.int64]]] = {}  # Free space: the bins that have it.
    available = 0  # Bit c is set if a bin has c free.
    num_bins = item = 0
    sizes, counts = np.unique(-lengths, return_counts=True)
    for size, count in zip((-sizes).tolist(), counts.tolist(), strict=True):
        stop = item + count
        while item < stop:
            above = available >> size
            if above:
                space = size + (above & -above).bit_length() - 1
                available ^= 1 << space
                group = np.concatenate(free.pop(space))
            else:
                space = capacity
                needed = -(-(stop - item) // (capacity // size))
                group = np.arange(num_bins, num_bins + needed)
                num_bins += len(group)
            each = space // size
            num_full, more = divmod(min(len(group) * each, stop - item), each)
            used = num_full * each + more
            bins[item : item + used] = np.repeat(group[: num_full + 1], each)[:used]
            item += used
            for part, left in (
                (group[:num_full], space - each * size),
                (group[num_full : num_full + 1], space - more * size),
                (group[num_full + 1 :], space),
            ):
                if left and len(part):
                    free.setdefault(left, []).append(part)
                    available |= 1 << left
    return bins
