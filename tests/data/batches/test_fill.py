"""A batch that is filled all rows at once is the one that a loop over tokens makes."""

import numpy as np
import numpy.typing as npt
import pytest

from moelib.core.tree import Batch
from moelib.data.batches.fill import fill_pieces
from moelib.data.batches.input import empty_batch
from moelib.data.batches.packing import DocumentBoundary, Packing, Pieces, make_plan
from moelib.data.tokens.token_source import InMemoryTokens, TokenSource

RESET, CONTINUE = DocumentBoundary.RESET, DocumentBoundary.CONTINUE
LENGTHS = [1, 2, 40, 9, 8, 17, 3, 3, 1, 25, 16, 2, 31, 5]
SEQ_LEN = 8
NUM_ROWS = 6  # Of the batch.


@pytest.fixture(scope="module")
def source() -> TokenSource:
    """Documents of random tokens, which cover 0 to 9 bytes."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 99, n).tolist() for n in LENGTHS]
    tokens = InMemoryTokens.default_config().set(documents=documents, vocab_size=99).instantiate()
    tokens.token_num_bytes = rng.integers(0, 10, 99).astype(np.int32)
    return tokens


def _batch() -> Batch:
    """Returns a batch whose padding can be told from all that is written."""
    batch = empty_batch(NUM_ROWS, SEQ_LEN, eos_id=-7)
    batch["target_num_bytes"][:] = -7
    return batch


def _fill_slowly(
    batch: Batch,
    rows: npt.NDArray[np.int64],
    pieces: Pieces,
    source: TokenSource,
    boundary: DocumentBoundary,
) -> None:
    """Like `fill_pieces`, token by token."""
    tokens = source.file(0)
    column, segment = [0] * len(rows), [0] * len(rows)
    batch["target_num_bytes"][rows] = 0
    for row, start, length, after in zip(
        pieces.row, pieces.start, pieces.length, pieces.next_token, strict=True
    ):
        segment[row] += 1
        ids = tokens[start : start + length]
        for i, (token, target) in enumerate(zip(ids, [*ids[1:], tokens[after]], strict=True)):
            cell = rows[row], column[row]
            batch["input_ids"][cell] = token
            batch["target_labels"][cell] = target
            batch["segment_ids"][cell] = segment[row] if boundary is RESET else 1
            batch["positions"][cell] = i if boundary is RESET else column[row]
            batch["target_num_bytes"][rows[row]] += source.token_num_bytes[target]
            column[row] += 1


WAYS = [
    (Packing.CONCAT_AND_SPLIT, RESET),
    (Packing.CONCAT_AND_SPLIT, CONTINUE),
    (Packing.BEST_FIT, RESET),
]


@pytest.mark.parametrize(("packing", "boundary"), WAYS)
@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4, 5], [2, 3, 4], [0, 2, 5], [1], [0, 5]], ids=str)
def test_sequences_are_those_of_a_loop_over_tokens(source, packing, boundary, rows):
    plan = make_plan(source, SEQ_LEN, packing, boundary, seeds=(0, 0))
    assert plan.num_rows > 2 * NUM_ROWS
    seen_full, seen_padded = False, False
    for first in range(plan.num_rows - len(rows) + 1):
        pieces = plan.pieces(np.arange(first, first + len(rows)))
        filled, expected = _batch(), _batch()
        fill_pieces(filled, np.array(rows), pieces, source, boundary)
        _fill_slowly(expected, np.array(rows), pieces, source, boundary)
        for name, array in expected.items():
            np.testing.assert_array_equal(filled[name], array, err_msg=name)
        full = pieces.length.sum() == len(rows) * SEQ_LEN
        seen_full, seen_padded = seen_full or full, seen_padded or not full
    assert seen_padded
    assert seen_full or packing is Packing.BEST_FIT


def _pieces(*pieces: tuple[int, int, int, int]) -> Pieces:
    return Pieces(*(np.array(column, np.int64) for column in zip(*pieces, strict=True)))


def test_positions_of_consecutive_documents_restart_or_continue():
    documents = [[11, 12, 13], [21, 22]]
    tokens = InMemoryTokens.default_config().set(documents=documents, vocab_size=30).instantiate()
    pieces = _pieces((0, 0, 2, 2), (0, 3, 1, 4))
    batches = [empty_batch(1, 4, 0), empty_batch(1, 4, 0)]
    for boundary, batch in zip((RESET, CONTINUE), batches, strict=True):
        fill_pieces(batch, np.array([0]), pieces, tokens, boundary)
        assert batch["input_ids"].tolist() == [[11, 12, 21, 0]]
        assert batch["target_labels"].tolist() == [[12, 13, 22, -1]]
        assert batch["target_num_bytes"].tolist() == [3]
    reset, continued = batches
    assert reset["segment_ids"].tolist() == [[1, 1, 2, 0]]
    assert reset["positions"].tolist() == [[0, 1, 0, 0]]
    assert continued["segment_ids"].tolist() == [[1, 1, 1, 0]]
    assert continued["positions"].tolist() == [[0, 1, 2, 0]]


@pytest.mark.parametrize("wrong", [1, 2])  # An input; a last target, which no row has as an input.
def test_a_token_beyond_the_vocabulary_is_noticed_when_it_is_read(wrong):
    cfg = InMemoryTokens.default_config().set(documents=[[1, 2, 3]], vocab_size=9)
    tokens = cfg.instantiate()
    tokens.file(0)[wrong] = 60_000
    with pytest.raises(ValueError, match=r"InMemoryTokens.*1 documents:.*id 60000.*9"):
        fill_pieces(empty_batch(1, 2, 0), np.array([0]), _pieces((0, 0, 2, 2)), tokens, RESET)
