import pytest

from moelib.data.source import InMemorySource, fingerprint, sample_documents, spread


def test_documents_come_in_order_whatever_the_parts():
    texts = [f"document {i}" for i in range(10)]
    for size in (1, 3, 100):
        source = InMemorySource.default_config().set(texts=texts, documents_per_part=size)
        assert list(source.instantiate().documents()) == texts
    assert len(source.set(documents_per_part=4).instantiate().parts()) == 3


def test_fingerprint_depends_on_the_texts():
    prints = [
        fingerprint(InMemorySource.default_config().set(texts=texts).instantiate().parts())
        for texts in (["a", "b"], ["a", "b"], ["b", "a"])
    ]
    assert prints[0] == prints[1] != prints[2]


def test_no_documents_are_refused():
    with pytest.raises(ValueError, match="InMemorySource has no documents; set texts"):
        InMemorySource.default_config().set(texts=[]).instantiate().parts()


def test_a_sample_comes_from_all_over_and_has_the_asked_size():
    texts = [f"{i:04d}" for i in range(1000)]
    source = InMemorySource.default_config().set(texts=texts, documents_per_part=50).instantiate()
    sample = list(sample_documents(source, 400))
    assert len(sample) == 100
    assert len({int(text) // 50 for text in sample}) == 20
    assert sample == list(sample_documents(source, 400))
    assert sorted(sample_documents(source, 10_000)) == texts


def test_a_share_of_texts_is_spread_over_all():
    texts = [f"{i:04d}" for i in range(1000)]
    taken = [int(text) for text in spread(texts, 0.1)]
    assert len(taken) == 101  # The first, and then a tenth.
    assert {number // 100 for number in taken} == set(range(10))
    assert list(spread(texts, 1.0)) == texts
