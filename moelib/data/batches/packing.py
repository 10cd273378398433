"""Packing: the pieces of documents that form each sequence, as a pure function of a seed.

Packing arranges *pairs* of a token and its target, the next token. A document of n tokens has n - 1
pairs, because nothing follows its last token; an end-of-text token is a target and never an input.
Every pair is in exactly one sequence of every epoch: none is dropped or repeated, and only the last
sequence (concat-and-split) or the ends of sequences (best-fit) are padded.

With `DocumentBoundary.CONTINUE` the documents of an epoch are one stream instead, in which the
last token of a document predicts the first of the next: positions and segments ignore documents,
as in Megatron-LM without resets (and FLAME-MoE). The stream has one pair less than tokens.

Letters: N documents, R sequences of an epoch, S sequence length, P pieces.
"""

import dataclasses
import enum
from abc import abstractmethod

import numpy as np
import numpy.typing as npt

from moelib.core.errors import UserError
from moelib.data.hashing import random_permutation
from moelib.data.tokens.token_source import TokenSource

_Ints = npt.NDArray[np.int64]


class Packing(enum.Enum):
    """The way documents become sequences."""

    CONCAT_AND_SPLIT = "concat_and_split"  # One after another, cut every S pairs.
    BEST_FIT = "best_fit"  # Whole where they fit (arXiv:2404.10830): fewer cuts, some padding.


class DocumentBoundary(enum.Enum):
    """The transition between documents in one sequence."""

    RESET = "reset"  # Each document has its own segment and positions from 0; no target across.
    CONTINUE = "continue"  # One segment and one run of positions; targets across documents.


class LongDocuments(enum.Enum):
    """The treatment of a document with more than S pairs."""

    SPLIT = "split"  # The rest are segments of other sequences, without the earlier context.
    ERROR = "error"  # Refused.


@dataclasses.dataclass(frozen=True)
class Pieces:
    """P pieces of documents, in the order of sequences and of positions in them."""

    row: _Ints  # [P] index of the piece's sequence among those requested.
    start: _Ints  # [P] global position of the piece's first token.
    length: _Ints  # [P] pairs.
    next_token: _Ints  # [P] global position of the target of the piece's last token.


class EpochPlan:
    """The sequences of one epoch."""

    num_rows: int

    @abstractmethod
    def pieces(self, rows: _Ints) -> Pieces:
        """Returns the pieces of sequences, each in [0, num_rows)."""


def make_plan(
    source: TokenSource,
    seq_len: int,
    packing: Packing,
    boundary: DocumentBoundary,
    seeds: tuple[int, ...] | None,
) -> EpochPlan:
    """Returns the plan of an epoch.

    `seeds`, usually seed and epoch, decide the order of documents and sequences; without them it is
    that of the source.

    Raises:
        UserError: If there is no pair to predict, or best-fit is to continue over boundaries.
    """
    if boundary is DocumentBoundary.CONTINUE:
        if packing is not Packing.CONCAT_AND_SPLIT:
            raise UserError(
                "packing=BEST_FIT does not form a stream; set document_boundary to RESET, or "
                "packing to CONCAT_AND_SPLIT."
            )
        return ConcatPlan(source, seq_len, seeds, across=True)
    if packing is Packing.BEST_FIT:
        return BestFitPlan(source, seq_len, seeds)
    return ConcatPlan(source, seq_len, seeds, across=False)


def check_long_documents(source: TokenSource, seq_len: int) -> None:
    """Raises UserError if a document has more than S pairs."""
    index = int(np.argmax(source.lengths))
    if source.lengths[index] > seq_len + 1:
        raise UserError(
            f"seq_len={seq_len}: document {index} of {source.name} has {source.lengths[index]} "
            "tokens, more than a sequence and its last target; set long_documents to "
            f"LongDocuments.SPLIT, or seq_len to {source.lengths[index] - 1}."
        )


def _nothing_to_predict(source: TokenSource) -> UserError:
    return UserError(
        f"{source.name} has {source.num_documents} documents but no token that follows another; "
        "set source to one with documents of two tokens or more."
    )


_DOCUMENTS, _ROWS = 0, 1  # Last seeds of the two orders.


def _order(count: int, seeds: tuple[int, ...] | None, use: int) -> _Ints:
    return np.arange(count) if seeds is None else random_permutation(count, *seeds, use)


class ConcatPlan(EpochPlan):
    """Concat-and-split: the pairs of the shuffled documents one after another, S per sequence.

    Sequences are shuffled too, because a long document fills consecutive ones. `across` adds pairs
    whose target is the first token of the next document.
    """

    def __init__(
        self, source: TokenSource, seq_len: int, seeds: tuple[int, ...] | None, across: bool
    ) -> None:
        documents = np.flatnonzero(source.lengths >= (1 if across else 2))  # Those with a pair.
        self._documents = documents[_order(len(documents), seeds, _DOCUMENTS)]
        pairs = source.lengths[self._documents] - (0 if across else 1)
        if across:
            pairs[-1:] -= 1  # Nothing follows the last token of the epoch.
        self._ends = pairs.cumsum()  # In the epoch's stream of pairs.
        if not len(documents) or not self._ends[-1]:
            raise _nothing_to_predict(source)
        self._starts, self._seq_len, self._across = source.starts, seq_len, across
        self.num_rows = int(-(-self._ends[-1] // seq_len))
        self._rows = _order(self.num_rows, seeds, _ROWS)

    def pieces(self, rows: _Ints) -> Pieces:
        """Returns the documents under each sequence's part of the stream."""
        begin = self._rows[rows] * self._seq_len
        end = np.minimum(begin + self._seq_len, self._ends[-1])
        first = np.searchsorted(self._ends, begin, side="right")
        last = np.searchsorted(self._ends, end, side="left")
        row = np.repeat(np.arange(len(rows)), last - first + 1)
        index = np.arange(len(row)) - np.searchsorted(row, row) + first[row]
        document_end = self._ends[index]
        document_begin = np.where(index > 0, self._ends[index - 1], 0)
        piece_begin = np.maximum(document_begin, begin[row])
        piece_end = np.minimum(document_end, end[row])
        start = self._starts[self._documents[index]] + piece_begin - document_begin
        next_token = start + (piece_end - piece_begin)
        if self._across:
            last_document = len(self._documents) - 1
            leaves = (piece_end == document_end) & (index < last_document)
            following = self._documents[np.minimum(index + 1, last_document)]
            next_token = np.where(leaves, self._starts[following], next_token)
        return Pieces(row, start, piece_end - piece_begin, next_token)


class BestFitPlan(EpochPlan):
    """Best-fit decreasing: full sequences of long documents, and remainders packed together.

    Source: Ding et al., "Fewer Truncations Improve Language Modeling", arXiv:2404.10830. Bins of
    equal free space are interchangeable, so whole groups are filled at once: the time depends on
    the number of different lengths (at most S) rather than on that of documents.
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
        # Sequences before shuffling: the full ones, of a piece each, then the bins.
        self._start = np.concatenate(
            [
                source.starts[full] + offset,
                source.starts[documents] + num_full[documents] * seq_len,
            ]
        )
        self._length = np.concatenate([np.full(len(full), seq_len), rest[documents]])
        per_bin = np.bincount(bins)
        per_row = np.concatenate([np.ones(len(full), np.int64), per_bin])
        self._first = np.concatenate([[0], np.cumsum(per_row)])  # First piece of each sequence.
        self.num_rows = len(per_row)
        self._rows = _order(self.num_rows, seeds, _ROWS)

    def pieces(self, rows: _Ints) -> Pieces:
        """Returns the pieces of bins and full sequences."""
        chosen = self._rows[rows]
        first = self._first[chosen]
        row = np.repeat(np.arange(len(rows)), self._first[chosen + 1] - first)
        index = np.arange(len(row)) - np.searchsorted(row, row) + first[row]
        start, length = self._start[index], self._length[index]
        return Pieces(row, start, length, start + length)


def best_fit(lengths: _Ints, capacity: int) -> _Ints:
    """Returns the bin of each item, by best-fit: the fullest bin that still has room.

    Sizes of items are in decreasing order, each in [1, capacity].
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
