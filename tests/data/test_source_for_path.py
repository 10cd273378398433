import pytest

from moelib.core.errors import UserError
from moelib.data.files import TextFiles
from moelib.data.json_lines import JsonLines
from moelib.data.parquet import Parquet
from moelib.data.source_for_path import source_for_path


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.jsonl.zst", JsonLines), ("a.parquet", Parquet), ("a.txt", TextFiles)],
)
def test_the_names_of_files_decide(tmp_path, name, kind):
    (tmp_path / name).write_text("")
    assert source_for_path(str(tmp_path)).klass is kind
    assert source_for_path(str(tmp_path / name)).klass is kind
    (tmp_path / "README").write_text("x")  # A single file of unknown kind is text.
    assert list(source_for_path(str(tmp_path / "README")).instantiate().documents()) == ["x"]


def test_tables_of_text_mixed_folders_and_empty_ones_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        source_for_path(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="absent does not exist"):
        source_for_path(str(tmp_path / "absent"))
    for name in ("a.txt", "a.jsonl", "a.csv", "a.tsv"):
        (tmp_path / name).write_text("a,b")
    with pytest.raises(ValueError, match=r"\(JSON"):
        source_for_path(str(tmp_path))
    for name in ("a.csv", "a.tsv"):
        with pytest.raises(UserError, match=f"{name}.*JSON lines"):
            source_for_path(str(tmp_path / name))
    pattern = str(tmp_path / "*.jsonl")
    assert source_for_path(pattern).paths == [pattern]
