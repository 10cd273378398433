"""Filling a batch with pieces of documents, all rows at once.

Letters: S sequence length, P pieces, T tokens of all pieces, n rows.
"""

import numpy as np
import numpy.typing as npt

from moelib.data.input import Batch
from moelib.data.packing import DocumentBoundary, Pieces
from moelib.data.token_source import TokenSource, check_vocabulary


def fill_pieces(
    batch: Batch,
    places: npt.NDArray[np.int64],
    pieces: Pieces,
    source: TokenSource,
    boundary: DocumentBoundary,
) -> None:
    """Writes pieces of rows into a batch, which is empty there.

    Args:
        batch: What is written to.
        places: The row of the batch for each row that was asked for [n], ascending.
        pieces: What the rows are made of.
        source: The documents.
        boundary: Whether segments and positions begin anew with each document.

    Raises:
        ValueError: If a token id is beyond the source's vocabulary.
    """
    S = batch["input_ids"].shape[1]
    row, length = pieces.row, pieces.length
    before = np.cumsum(length) - length  # [P] where a piece begins among the T tokens.
    first = np.searchsorted(row, np.arange(len(places)))  # First piece of each row.
    in_row = before - before[first][row]
    to = places[row] * S + in_row  # [P] where a piece goes in the batch.
    T = int(length.sum())
    ids = np.empty(T, np.int32)
    source.read(pieces.start, length, ids, before)
    targets = np.empty(T, np.int32)
    targets[:-1] = ids[1:]
    targets[before + length - 1] = source.at(pieces.next_token)
    for tokens in (ids, targets):
        check_vocabulary(tokens, source.vocab_size, source.name)
    if boundary is DocumentBoundary.RESET:
        segment, begin = np.arange(len(row)) - first[row] + 1, before
    else:
        segment, begin = np.ones_like(row), before[first][row]
    along = np.arange(T, dtype=np.int32)
    where: slice | npt.NDArray[np.integer] = slice(places[0] * S, places[0] * S + T)
    if T != S * len(places) or places[-1] - places[0] != len(places) - 1:
        where = along + np.repeat(to - before, length)
    batch["input_ids"].reshape(-1)[where] = ids
    batch["target_labels"].reshape(-1)[where] = targets
    batch["segment_ids"].reshape(-1)[where] = np.repeat(segment.astype(np.int32), length)
    batch["positions"].reshape(-1)[where] = along - np.repeat(begin.astype(np.int32), length)
    sizes = source.token_num_bytes[targets]
    batch["target_num_bytes"][places] = np.add.reduceat(sizes, before[first])
