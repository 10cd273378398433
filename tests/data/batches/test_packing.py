import numpy as np
import pytest

from moelib.data.batches.packing import DocumentBoundary, Packing, best_fit, make_plan
from moelib.data.hashing import random_bits, random_permutation, random_uniform
from moelib.data.tokens.token_source import InMemoryTokens, TokenSource

RESET, CONTINUE = DocumentBoundary.RESET, DocumentBoundary.CONTINUE
LENGTHS = [1, 2, 40, 9, 8, 17, 3, 3, 1, 25, 16, 2, 31, 5]


def _source(lengths: list[int]) -> TokenSource:
    """Returns documents whose tokens are all different: token number i is i."""
    ends = np.cumsum(lengths)
    documents = [list(range(end - n, end)) for end, n in zip(ends.tolist(), lengths, strict=True)]
    cfg = InMemoryTokens.default_config().set(documents=documents, vocab_size=sum(lengths) + 1)
    return cfg.instantiate()


def _pairs(source: TokenSource, seq_len: int, packing: Packing, boundary: DocumentBoundary, seed=0):
    """Returns all pairs (token, target) of an epoch, as positions, and the pairs of each row."""
    plan = make_plan(source, seq_len, packing, boundary, (seed, 0))
    pieces = plan.pieces(np.arange(plan.num_rows))
    pairs = []
    per_row = np.bincount(pieces.row, pieces.length, plan.num_rows)
    for start, n, after in zip(pieces.start, pieces.length, pieces.next_token, strict=True):
        tokens = [*range(start, start + n), after]
        pairs += zip(tokens[:-1], map(int, tokens[1:]), strict=True)
    return pairs, per_row


@pytest.mark.parametrize("packing", list(Packing))
@pytest.mark.parametrize("seq_len", [1, 7, 8, 64, 1000])
def test_no_sequence_is_empty_or_too_long_and_splitting_fills_all_but_one(packing, seq_len):
    _, per_row = _pairs(_source(LENGTHS), seq_len, packing, RESET)
    assert per_row.min() >= 1
    assert per_row.max() <= seq_len
    if packing is Packing.CONCAT_AND_SPLIT:
        assert sorted(per_row)[1:] == [seq_len] * (len(per_row) - 1)


@pytest.mark.parametrize("seq_len", [1, 7, 64])
def test_a_stream_has_every_token_but_the_first_as_a_target_once(seq_len):
    source = _source(LENGTHS)
    pairs, per_row = _pairs(source, seq_len, Packing.CONCAT_AND_SPLIT, CONTINUE)
    total = source.num_tokens
    assert len({target for _, target in pairs}) == len({token for token, _ in pairs}) == total - 1
    assert len(pairs) == total - 1
    assert sorted(per_row)[1:] == [seq_len] * (len(per_row) - 1)
    # Targets across documents lead from an end to a beginning.
    ends = set((source.starts + source.lengths - 1).tolist())
    across = [(token, target) for token, target in pairs if target != token + 1]
    assert all(token in ends and target in source.starts for token, target in across)


def test_sequences_requested_in_any_order_are_the_same():
    plan = make_plan(_source(LENGTHS), 8, Packing.CONCAT_AND_SPLIT, RESET, (0, 0))
    together = plan.pieces(np.array([3, 1, 5]))
    for index, row in enumerate([3, 1, 5]):
        alone = plan.pieces(np.array([row]))
        assert np.array_equal(together.start[together.row == index], alone.start)
        assert np.array_equal(together.length[together.row == index], alone.length)


@pytest.mark.parametrize("packing", list(Packing))
def test_order_depends_on_seed_and_epoch_only(packing):
    source = _source(LENGTHS)
    rows = np.arange(make_plan(source, 16, packing, RESET, (0, 0)).num_rows)
    starts = [
        tuple(make_plan(source, 16, packing, RESET, seeds).pieces(rows).start)
        for seeds in ((0, 0), (0, 0), (0, 1), (1, 0))
    ]
    assert starts[0] == starts[1]
    assert len(set(starts)) == 3


@pytest.mark.parametrize("packing", list(Packing))
def test_an_epoch_is_a_shuffle_of_the_whole_corpus_whatever_its_order_on_disk(packing):
    source = _source([9] * 1000 + [33] * 200 + [5] * 2000)
    tenths: list[np.ndarray] = []
    for epoch in range(2):
        plan = make_plan(source, 8, packing, RESET, (0, epoch))
        pieces = plan.pieces(np.arange(plan.num_rows))
        assert np.array_equal(np.unique(pieces.row), np.arange(plan.num_rows))
        when = 10 * pieces.row // plan.num_rows
        where = 10 * pieces.start // source.num_tokens
        pairs = np.zeros((10, 10))  # By the tenth of the epoch, and that of the corpus.
        np.add.at(pairs, (when, where), pieces.length)
        tenths.append(pairs / pairs.sum(0))
    for shares in tenths:  # 0.1 each, with the deviation of chance.
        assert 0.05 < shares.min() < shares.max() < 0.16
    assert not np.array_equal(*tenths)


def test_best_fit_keeps_documents_that_fit_whole():
    source = _source(LENGTHS)
    plan = make_plan(source, 40, Packing.BEST_FIT, RESET, (0, 0))
    pieces = plan.pieces(np.arange(plan.num_rows))
    assert sorted(pieces.length.tolist()) == sorted(n - 1 for n in LENGTHS if n > 1)


def _slow_best_fit(lengths: list[int], capacity: int) -> list[int]:
    """Returns the free space of bins that best-fit leaves, an item at a time."""
    free: list[int] = []
    for length in lengths:
        fitting = [space for space in free if space >= length]
        if fitting:
            free.remove(min(fitting))
        free.append((min(fitting) if fitting else capacity) - length)
    return sorted(free)


@pytest.mark.parametrize("seed", range(5))
def test_best_fit_equals_the_textbook_algorithm(seed):
    rng = np.random.default_rng(seed)
    lengths = -np.sort(-rng.integers(1, 65, 500))
    bins = best_fit(lengths, 64)
    used = np.bincount(bins, lengths).astype(int)
    assert sorted(64 - used) == _slow_best_fit(lengths.tolist(), 64)
    assert set(bins.tolist()) == set(range(len(used)))


@pytest.mark.parametrize(
    ("lengths", "packing", "boundary", "message"),
    [
        ([1, 1], Packing.CONCAT_AND_SPLIT, RESET, "InMemoryTokens.*2 documents"),
        ([1, 1], Packing.BEST_FIT, RESET, "InMemoryTokens.*2 documents"),
        ([3], Packing.BEST_FIT, CONTINUE, "packing=BEST_FIT"),  # It forms no stream.
    ],
)
def test_documents_that_make_no_sequences_are_refused(lengths, packing, boundary, message):
    with pytest.raises(ValueError, match=message):
        make_plan(_source(lengths), 8, packing, boundary, (0, 0))


def test_bits_are_those_of_splitmix64():
    # The first outputs of the published generator from state 0.
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert random_bits(3).tolist() == expected


def test_uniform_numbers_fill_the_unit_interval():
    uniform = random_uniform(100_000, 1, 2)
    counts = np.histogram(uniform, bins=10, range=(0, 1))[0]
    assert counts.sum() == 100_000
    assert abs(counts - 10_000).max() < 500  # Five standard deviations.


def test_permutation_is_one_and_depends_on_every_seed():
    orders = [random_permutation(1000, *seeds) for seeds in ((0, 1), (1, 0), (0, 1, 0), (-1, 1))]
    assert all(np.array_equal(np.sort(order), np.arange(1000)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert np.array_equal(orders[0], random_permutation(1000, 0, 1))
