import pyarrow
import pytest
from pyarrow import parquet

from moelib.data import files
from moelib.data.parquet import Parquet
from moelib.data.source import BadRecordError, BadRecords


def _source(path: object, **fields: str) -> Parquet:
    return Parquet.default_config().set(paths=[str(path)], **fields).instantiate()


def test_row_groups_are_parts_and_rows_are_documents(tmp_path, monkeypatch):
    texts = [f"row {i}" for i in range(10)]
    table = pyarrow.table({"text": texts, "id": list(range(10))})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    assert list(_source(tmp_path).documents()) == texts
    assert len(_source(tmp_path).parts()) == 1
    monkeypatch.setattr(files, "_MIN_PART_BYTES", 1)
    monkeypatch.setattr(files, "_MAX_PART_BYTES", 1)
    assert len(_source(tmp_path).parts()) == 4
    assert list(_source(tmp_path).documents()) == texts


_BYTES = pyarrow.array([b"a", b"b", b"\xff", b"d"])


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        (pyarrow.array(["a", "b", None, "d"]), "None"),
        (pyarrow.Array.from_buffers(pyarrow.string(), 4, _BYTES.buffers()), "UnicodeDecodeError"),
    ],
)
def test_a_value_without_text_is_named_or_counted(tmp_path, monkeypatch, column, reason):
    monkeypatch.setattr(files, "_MIN_PART_BYTES", 1)
    monkeypatch.setattr(files, "_MAX_PART_BYTES", 1)
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet", row_group_size=2)
    with pytest.raises(BadRecordError, match=rf"a\.parquet, row 3:.*'text'.*{reason}"):
        list(_source(tmp_path).documents())
    bad = BadRecords()
    assert list(_source(tmp_path).documents(bad)) == ["a", "b", "d"]
    assert bad.count == 1


@pytest.mark.parametrize(("num_files", "with_group"), [(1, False), (3, True)])
def test_files_without_rows_are_named(tmp_path, num_files, with_group):
    empty = pyarrow.table({"text": pyarrow.array([], pyarrow.string())})
    for number in range(num_files):
        path = tmp_path / f"{number}.parquet"
        with parquet.ParquetWriter(path, empty.schema) as writer:
            if with_group:
                writer.write_table(empty)
    more = " and 2 more files" if num_files > 1 else ""
    with pytest.raises(ValueError, match=rf"0\.parquet{more}"):
        list(_source(tmp_path).documents())
    parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "z.parquet")
    assert list(_source(tmp_path).documents()) == ["a"]


def test_a_missing_column_and_another_kind_of_file_are_named(tmp_path):
    parquet.write_table(pyarrow.table({"body": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"'text'.*\['body'\]"):
        _source(tmp_path).parts()
    assert list(_source(tmp_path, column="body").documents()) == ["a"]
    (tmp_path / "a.parquet").write_text("no table at all")
    with pytest.raises(ValueError, match=r"a.parquet"):
        _source(tmp_path).parts()
