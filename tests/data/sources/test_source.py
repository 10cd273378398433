import pytest

from moelib.data.sources.delimited import Delimited
from moelib.data.sources.files import TextFiles
from moelib.data.sources.json_lines import JsonLines
from moelib.data.sources.source import InMemorySource, fingerprint
from moelib.data.sources.source_for_path import source_for_path
from moelib.data.sources.tables import Tables


def test_documents_come_in_order_whatever_the_parts():
    texts = [f"document {i}" for i in range(130)]
    source = InMemorySource.default_config().set(texts=texts).instantiate()
    assert list(source.documents()) == texts
    assert [len(part.texts) for part in source.parts()] == [64, 64, 2]


def test_fingerprint_depends_on_the_texts():
    prints = [
        fingerprint(InMemorySource.default_config().set(texts=texts).instantiate().parts())
        for texts in (["a", "b"], ["a", "b"], ["b", "a"])
    ]
    assert prints[0] == prints[1] != prints[2]


def test_no_documents_are_refused():
    with pytest.raises(ValueError, match="InMemorySource"):
        InMemorySource.default_config().set(texts=[]).instantiate().parts()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.jsonl.zst", JsonLines),
        ("a.parquet", Tables),
        ("a.txt", TextFiles),
        ("a.csv", Delimited),
        ("a.tsv.gz", Delimited),
    ],
)
def test_the_names_of_files_decide(tmp_path, name, kind):
    (tmp_path / name).write_text("")
    assert source_for_path(str(tmp_path)).klass is kind
    assert source_for_path(str(tmp_path / name)).klass is kind
    (tmp_path / "README").write_text("x")  # A single file of unknown kind is text.
    assert list(source_for_path(str(tmp_path / "README")).instantiate().documents()) == ["x"]


def test_mixed_folders_and_empty_ones_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        source_for_path(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="absent does not exist"):
        source_for_path(str(tmp_path / "absent"))
    for name in ("a.txt", "a.jsonl", "a.csv"):
        (tmp_path / name).write_text("a,b")
    with pytest.raises(ValueError, match=r"\(JSON lines, CSV or TSV, text"):
        source_for_path(str(tmp_path))
    pattern = str(tmp_path / "*.jsonl")
    assert source_for_path(pattern).paths == [pattern]
