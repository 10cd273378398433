"""Folders as `datasets.Dataset.save_to_disk` writes them."""

import json
import os
import pathlib

import pyarrow
import pytest

from moelib.core.errors import UserError
from moelib.data import files
from moelib.data.arrow import ArrowFiles
from moelib.data.source import BadRecordError
from moelib.data.source_for_path import source_for_path

TEXTS = [f"document {i} ü" for i in range(25)]


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


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_a_saved_dataset_gives_its_rows(tmp_path, monkeypatch, size):
    monkeypatch.setattr(files, "_MIN_PART_BYTES", size)
    monkeypatch.setattr(files, "_MAX_PART_BYTES", size)
    source = source_for_path(_save(tmp_path / "saved", TEXTS)).instantiate()
    assert isinstance(source, ArrowFiles)
    assert len(source.parts()) == (6 if size == 1 else 2)
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


def test_wrong_columns_values_and_files_are_named(tmp_path):
    path = _save(tmp_path / "saved", ["a", None, "c"], num_files=1)
    with pytest.raises(ValueError, match=r"'body'.*\['id', 'text'\]"):
        source_for_path(path, text_field="body").instantiate().parts()
    source = source_for_path(path).instantiate()
    with pytest.raises(BadRecordError, match=r"00001.arrow, row 2:.*'text'.*None"):
        list(source.documents())
    (tmp_path / "saved" / "z.arrow").write_bytes(b"no table")
    with pytest.raises(ValueError, match=r"z.arrow"):
        source.parts()


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
