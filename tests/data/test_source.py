import pytest

from moelib.data.files import FileStamp, TextFilesPart
from moelib.data.json_lines import JsonLinesPart
from moelib.data.parquet import ParquetPart
from moelib.data.source import InMemorySource, Part, TextHash, fingerprint
from moelib.data.tfds_source import TFDSPart


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


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (TextFilesPart((FileStamp("a/b.txt", 5, 7),), "utf-8", None), "6100fb70c64377c3"),
        (JsonLinesPart(FileStamp("a.jsonl", 5, 7), "text", 0, 5), "7e5598aa2d5d00ed"),
        (ParquetPart(FileStamp("a.parquet", 5, 7), "text", (0, 1), 0, 9), "955ef0921edd40af"),
        (TFDSPart("folder", "train", 0, 3, "text", 30), "51c5580cae5b49d8"),
    ],
)
def test_stores_of_older_versions_know_their_source(part: Part, expected: str):
    assert fingerprint([part])[:16] == expected


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
