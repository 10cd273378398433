import pytest

from moelib.data.source import InMemorySource, TextHash, fingerprint


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


def test_a_text_hash_depends_on_the_division_into_documents():
    hashes = set()
    for texts in ([b"ab"], [b"a", b"b"], [b"", b"ab"], []):
        text_hash = TextHash()
        for text in texts:
            text_hash.add(text)
        hashes.add(text_hash.hexdigest())
    assert len(hashes) == 4


def test_no_documents_are_refused():
    with pytest.raises(ValueError, match="InMemorySource"):
        InMemorySource.default_config().set(texts=[]).instantiate().parts()
