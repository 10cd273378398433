"""Filling a batch with pieces of documents, all sequences at once.

Letters: S sequence length, P pieces, T tokens of all pieces, n sequences.
"""

import functools
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from moelib.data.batches.input import TOKEN_ARRAYS
from moelib.data.batches.packing import DocumentBoundary, Pieces
from moelib.data.tokens.token_source import TokenSource, check_vocabulary

if TYPE_CHECKING:
    from moelib.core.tree import Batch


def fill_pieces(
    batch: "Batch",
    rows: npt.NDArray[np.int64],
    pieces: Pieces,
    source: TokenSource,
    boundary: DocumentBoundary,
) -> None:
    """Writes pieces of sequences into rows of a batch that hold padding.

    Args:
        batch: The batch to write.
        rows: Row of the batch for each sequence [n], ascending.
        pieces: Pieces of these sequences.
        source: Documents of the pieces.
        boundary: Whether segments and positions restart with each document.

    Raises:
        UserError: If a token id is beyond the source's vocabulary.
    """
    S = batch["input_ids"].shape[1]
    row, length = pieces.row, pieces.length
    n, T = len(rows), int(length.sum())
    before = np.cumsum(length) - length  # [P] index of each piece's first token among the T.
    first = np.searchsorted(row, np.arange(n))  # [n] first piece of each sequence.
    row_begin = before[first]
    full = T == n * S
    in_place = full and rows[-1] - rows[0] == n - 1
    # Consecutive full sequences are written into the batch without copies.
    begin = int(rows[0]) * S
    ids, targets, segments, positions = (
        batch[name].reshape(-1)[begin : begin + T] if in_place else np.empty(T, np.int32)
        for name in TOKEN_ARRAYS
    )
    source.read(pieces.start, length, ids, before)
    targets[:-1] = ids[1:]
    next_tokens = source.at(pieces.next_token)
    targets[before + length - 1] = next_tokens
    for tokens in (ids, next_tokens):
        check_vocabulary(tokens, source.vocab_size, source.name)
    if boundary is DocumentBoundary.RESET:
        segment, origin = np.arange(1, len(row) + 1) - first[row], before
    else:
        segment, origin = np.ones_like(row), row_begin[row]
    segments[:] = np.repeat(segment.astype(np.int32), length)
    np.subtract(_count(T), np.repeat(origin.astype(np.int32), length), out=positions)
    sizes = source.token_num_bytes.take(targets, mode="clip")  # Faster; ids are checked.
    if source.label_bounds is not None:
        at = np.repeat(pieces.start - before, length) + np.arange(1, T + 1)  # Of the targets.
        at[before + length - 1] = pieces.next_token
        is_label = np.searchsorted(source.label_bounds, at, side="right") % 2 == 1
        targets[~is_label], sizes = -1, sizes * is_label
    batch["target_num_bytes"][rows] = np.add.reduceat(sizes, row_begin)
    if in_place:
        return
    to = np.repeat(rows[row] * S - row_begin[row], length) + _count(T)
    for name, tokens in zip(TOKEN_ARRAYS, (ids, targets, segments, positions), strict=True):
        if full:
            batch[name][rows] = tokens.reshape(n, S)
        else:
            batch[name].reshape(-1)[to] = tokens


@functools.lru_cache(maxsize=4)
def _count(stop: int) -> npt.NDArray[np.int32]:
    """Returns 0, 1, ... below `stop`; the array is shared and must not be written."""
    return np.arange(stop, dtype=np.int32)
