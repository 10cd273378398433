import numpy as np
import pytest

from moelib.data.token_source import InMemoryTokens


def _tokens(documents: list[list[int]], vocab_size: int = 10) -> InMemoryTokens:
    cfg = InMemoryTokens.default_config().set(documents=documents, vocab_size=vocab_size)
    return cfg.instantiate()


def test_documents_are_read_back():
    source = _tokens([[1, 2, 3], [4], [5, 6]])
    assert [source.document(i).tolist() for i in range(3)] == [[1, 2, 3], [4], [5, 6]]
    assert (source.num_documents, source.num_tokens) == (3, 6)
    with pytest.raises(IndexError, match=r"3 documents.*4"):
        source.document(3)


def test_pieces_go_where_they_are_told():
    source, out = _tokens([[1, 2, 3], [4, 5, 6]]), np.zeros(5, np.int32)
    source.read(np.array([4, 0]), np.array([2, 1]), out, [0, 4])
    assert out.tolist() == [5, 6, 0, 0, 1]
    assert source.at(np.array([5, 0])).tolist() == [6, 1]


def test_fingerprint_sees_tokens_and_boundaries():
    documents = ([[1, 2], [3]], [[1, 2], [3]], [[1], [2, 3]], [[1, 2], [4]])
    prints = [_tokens(some).fingerprint for some in documents]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


@pytest.mark.parametrize("wrong", [10, -1])
def test_id_beyond_the_vocabulary_is_named(wrong):
    with pytest.raises(ValueError, match=rf"id {wrong} \(token 2\).*10"):
        _tokens([[1, 2], [wrong]])


def test_no_documents_are_refused():
    with pytest.raises(ValueError, match="InMemoryTokens"):
        _tokens([])
