import pathlib

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
def test_the_names_of_files_decide(tmp_path: pathlib.Path, name: str, kind: type):
    (tmp_path / name).write_text("")
    assert source_for_path(str(tmp_path)).klass is kind
    assert source_for_path(str(tmp_path / name)).klass is kind


def test_a_single_file_of_unknown_kind_is_text(tmp_path: pathlib.Path):
    (tmp_path / "README").write_text("x")
    source = source_for_path(str(tmp_path / "README")).instantiate()
    assert list(source.documents()) == ["x"]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_a_table_of_text_is_refused(tmp_path: pathlib.Path, name: str):
    (tmp_path / name).write_text("a,b")
    with pytest.raises(UserError, match=f"{name}.*JSON lines"):
        source_for_path(str(tmp_path / name))


def test_a_mixed_folder_and_an_empty_one_are_refused(tmp_path: pathlib.Path):
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        source_for_path(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="absent does not exist"):
        source_for_path(str(tmp_path / "absent"))
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"\(JSON"):
        source_for_path(str(tmp_path))
    pattern = str(tmp_path / "*.jsonl")
    assert source_for_path(pattern).paths == [pattern]
