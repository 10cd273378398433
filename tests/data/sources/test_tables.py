"""Parquet files, and folders of Arrow files as `datasets.Dataset.save_to_disk` writes them."""

import json
import os
import pathlib

import pyarrow
import pytest
from pyarrow import parquet

from moelib.core.errors import UserError
from moelib.data.sources import files
from moelib.data.sources.source import BadRecordError, BadRecords
from moelib.data.sources.source_for_path import source_for_path
from moelib.data.sources.tables import Tables

TEXTS = [f"document {i} ü" for i in range(25)]


def _source(path: object, **fields: str) -> Tables:
    return Tables.default_config().set(paths=[str(path)], **fields).instantiate()


def _save(folder: pathlib.Path, texts: list[str | None], num_files: int = 2) -> str:
    folder.mkdir()
    for index in range(num_files):
        name = f"data-{index:05d}-of-{num_files:05d}.arrow"
        table = pyarrow.table({"text": texts[index::num_files], "id": texts[index::num_files]})
        with pyarrow.ipc.new_stream(str(folder / name), table.schema) as writer:
            writer.write_table(table, max_chunksize=5)
    (folder / "dataset_info.json").write_text(json.dumps({"features": {"text": {}}}))
    (folder / "state.json").write_text(json.dumps({"_split": None}))
    return str(folder)


def _divide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes each group of a file a part."""
    monkeypatch.setattr(files, "_MIN_PART_BYTES", 1)
    monkeypatch.setattr(files, "_MAX_PART_BYTES", 1)


def test_row_groups_are_parts_and_rows_are_documents(tmp_path, monkeypatch):
    table = pyarrow.table({"text": TEXTS[:10], "id": list(range(10))})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    assert list(_source(tmp_path).documents()) == TEXTS[:10]
    assert len(_source(tmp_path).parts()) == 1
    _divide(monkeypatch)
    assert len(_source(tmp_path).parts()) == 4
    assert list(_source(tmp_path).documents()) == TEXTS[:10]


def test_a_saved_dataset_gives_its_rows(tmp_path, monkeypatch):
    source = source_for_path(_save(tmp_path / "saved", TEXTS)).instantiate()
    assert isinstance(source, Tables)
    assert len(source.parts()) == 2
    assert list(source.documents()) == TEXTS[::2] + TEXTS[1::2]
    _divide(monkeypatch)
    assert len(source.parts()) == 6
    assert list(source.documents()) == TEXTS[::2] + TEXTS[1::2]


def test_a_saved_dict_of_datasets_names_its_splits(tmp_path):
    (tmp_path / "saved").mkdir()
    for split in ("train", "test"):
        _save(tmp_path / "saved" / split, TEXTS[:3], num_files=1)
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ValueError, match=r"\['test', 'train'\]"):
        source_for_path(str(tmp_path / "saved"))
    source = source_for_path(str(tmp_path / "saved" / "train")).instantiate()
    assert list(source.documents()) == TEXTS[:3]


_BYTES = pyarrow.array([b"a", b"b", b"\xff", b"d"])


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        (pyarrow.array(["a", "b", None, "d"]), "None"),
        (pyarrow.Array.from_buffers(pyarrow.string(), 4, _BYTES.buffers()), "UnicodeDecodeError"),
    ],
)
def test_a_value_without_text_is_named_or_counted(tmp_path, monkeypatch, column, reason):
    _divide(monkeypatch)
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


def test_wrong_columns_values_and_files_are_named(tmp_path):
    parquet.write_table(pyarrow.table({"body": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"'text'.*\['body'\]"):
        _source(tmp_path).parts()
    assert list(_source(tmp_path, column="body").documents()) == ["a"]
    (tmp_path / "a.parquet").write_text("no table at all")
    with pytest.raises(ValueError, match=r"a.parquet"):
        _source(tmp_path).parts()
    path = _save(tmp_path / "saved", ["a", None, "c"], num_files=1)
    with pytest.raises(ValueError, match=r"'body'.*\['id', 'text'\]"):
        source_for_path(path, text_field="body").instantiate().parts()
    source = source_for_path(path).instantiate()
    with pytest.raises(BadRecordError, match=r"00001.arrow, row 2:.*'text'.*None"):
        list(source.documents())


def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path):
    # Reading the mapped file then ended the process by the signal SIGBUS.
    path = _save(tmp_path / "saved", [f"{i} " * 10_000 for i in range(25)], num_files=1)
    documents = source_for_path(path).instantiate().documents()
    for _ in range(5):
        next(documents)
    (file,) = pathlib.Path(path).glob("*.arrow")
    os.truncate(file, 0)
    with pytest.raises(UserError, match=rf"{file} has been cut from \d+ to 0 bytes"):
        list(documents)
