"""Folders of safetensors: read back, over many files, and what is damaged."""

import json
import os
import pathlib
import re

import ml_dtypes
import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from moelib.checkpoint.safetensors import DamagedTensorsError, TensorFolder, add_sums, write_tensors
from moelib.core.errors import UserError

ARRAYS = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b.weight": np.arange(6).astype(ml_dtypes.bfloat16),
    "c": np.array([[1, 2, 3]], np.int32),
}


def read_all(folder):
    with TensorFolder(str(folder)) as tensors:
        return {key: tensors.read(key) for key in tensors.keys()}  # noqa: SIM118


@pytest.mark.parametrize(("max_file_bytes", "num_files"), [(1 << 20, 1), (60, 2), (1, 3)])
def test_tensors_come_back_from_one_file_and_from_many(tmp_path, max_file_bytes, num_files):
    (tmp_path / "other").touch()
    names = write_tensors(str(tmp_path), ARRAYS.items(), max_file_bytes=max_file_bytes)
    assert len(names) == num_files
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert modes == {(tmp_path / "other").stat().st_mode}  # Others may read them, as usual.
    found = read_all(tmp_path)
    assert found.keys() == ARRAYS.keys()
    for key, values in ARRAYS.items():
        assert found[key].dtype == values.dtype
        np.testing.assert_array_equal(found[key], values)
    with TensorFolder(str(tmp_path)) as tensors:
        assert {key: tensors.shape(key) for key in ARRAYS} == {
            k: v.shape for k, v in ARRAYS.items()
        }


def test_files_are_those_that_other_libraries_read(tmp_path):
    names = write_tensors(str(tmp_path), ARRAYS.items(), max_file_bytes=60)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(x.nbytes for x in ARRAYS.values())}
    assert index["weight_map"].keys() == ARRAYS.keys()
    for name in names:
        with safe_open(tmp_path / name, "np") as file:
            assert file.metadata() == {"format": "pt"}
            assert {k for k, v in index["weight_map"].items() if v == name} == set(file.keys())


def test_a_file_that_is_cut_off_is_named(tmp_path):
    write_tensors(str(tmp_path), ARRAYS.items())
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedTensorsError, match=re.escape(f"{path} ")):
        TensorFolder(str(tmp_path))


def test_a_flipped_bit_is_found(tmp_path):
    write_tensors(str(tmp_path), ARRAYS.items())
    path = tmp_path / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 4
    path.write_bytes(content)
    with pytest.raises(DamagedTensorsError, match=re.escape(f"{path} ")):
        read_all(tmp_path)
    with pytest.raises(KeyError, match="nothing"), TensorFolder(str(tmp_path)) as tensors:
        tensors.read("nothing")  # An error while reading is not hidden by the checksum.


def test_a_folder_without_sums_or_with_all_is_read_without_a_warning(tmp_path, caplog):
    save_file(ARRAYS, tmp_path / "model.safetensors")
    assert read_all(tmp_path).keys() == ARRAYS.keys()
    write_tensors(str(tmp_path / "sums"), ARRAYS.items())
    read_all(tmp_path / "sums")
    assert caplog.text == ""


def test_sums_that_list_tensors_only_are_read_with_a_warning(tmp_path, caplog):
    write_tensors(str(tmp_path), ARRAYS.items())
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    read_all(tmp_path)
    assert re.search(r"SHA256SUMS has no checksum of config\.json, tokenizer\.json", caplog.text)


def test_tensors_are_on_the_disk_before_they_get_their_name(tmp_path, monkeypatch):
    synced, replaced = set(), []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.add(os.fstat(fd).st_ino), sync(fd)))
    in_time = lambda old: replaced.append(os.stat(old).st_ino in synced)
    monkeypatch.setattr(os, "replace", lambda old, new: (in_time(old), replace(old, new)))
    write_tensors(str(tmp_path), ARRAYS.items(), max_file_bytes=60)
    assert replaced == [True] * 4  # Two files of tensors, the index and the sums.


def test_other_files_that_are_listed_are_compared(tmp_path):
    write_tensors(str(tmp_path), ARRAYS.items())
    (tmp_path / "config.json").write_text("{}")
    add_sums(str(tmp_path), ["config.json", "none.json"])
    (tmp_path / "config.json").write_text("{ }")
    with pytest.raises(DamagedTensorsError, match=r"config\.json.*SHA256SUMS"):
        read_all(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(DamagedTensorsError, match=r"config\.json.*SHA256SUMS"):
        read_all(tmp_path)


@pytest.mark.parametrize(
    "lines", [["*../x"], ["../x"], ["*/dev/zero"], ["config.json", "*./config.json"], ["x\0"], [""]]
)
def test_sums_name_each_file_of_their_folder_once(lines, tmp_path):
    write_tensors(str(tmp_path), ARRAYS.items())
    sums = tmp_path / "SHA256SUMS"
    sums.write_text(sums.read_text() + "".join(f"{'0' * 64} {name}\n" for name in lines))
    with pytest.raises(DamagedTensorsError, match="SHA256SUMS: each line must be"):
        TensorFolder(str(tmp_path))


def test_sums_of_other_tools_may_be_upper_case_and_binary(tmp_path):
    write_tensors(str(tmp_path), ARRAYS.items())
    sums = tmp_path / "SHA256SUMS"
    sums.write_text(f"{sums.read_text().split()[0].upper()} *model.safetensors\n")
    assert read_all(tmp_path).keys() == ARRAYS.keys()
    (tmp_path / "x.json").symlink_to("/dev/zero")
    sums.write_text(f"{sums.read_text()}{'0' * 64} x.json\n")
    with pytest.raises(DamagedTensorsError, match=r"x\.json cannot be read .*not a regular file"):
        read_all(tmp_path)


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/x", "a/../../x", "a\0b", "", ".", "a/", 3, None]
)
def test_an_index_names_files_of_its_folder(name, tmp_path):
    names = write_tensors(str(tmp_path / "x"), ARRAYS.items(), max_file_bytes=60)
    write_tensors(str(tmp_path), ARRAYS.items())
    path = tmp_path / "x/model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], name)
    path.write_text(json.dumps(index))
    with pytest.raises(DamagedTensorsError, match=r"index\.json: weight_map has "):
        read_all(tmp_path / "x")
    assert len(names) > 1


@pytest.mark.parametrize("text", ["[1]", '{"weight_map": []}', "[" * 100_000, '{"weight_map": 3}'])
def test_what_is_no_index_is_one_line(text, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UserError, match=r"index\.json"):
        TensorFolder(str(tmp_path))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors, nor .*index\.json"):
        TensorFolder(str(tmp_path))
    names = write_tensors(str(tmp_path), ARRAYS.items(), max_file_bytes=60)
    (tmp_path / names[1]).unlink()
    with pytest.raises(FileNotFoundError, match=rf"{names[1]}.*index.json"):
        TensorFolder(str(tmp_path))


class _Hostile:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self._path,)


@pytest.mark.parametrize("named_by", [None, "index", "name"])
def test_a_pickled_model_is_not_unpickled(named_by, tmp_path):
    name = "model.safetensors" if named_by == "name" else "pytorch_model.bin"
    hostile = np.array([_Hostile(tmp_path / "ran")], object)
    hostile.dump(tmp_path / name)
    if named_by == "index":
        index = json.dumps({"weight_map": {"a": name}})
        (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError, match="safetensors"):
        read_all(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_an_index_that_names_a_tensor_that_is_not_there_is_refused(tmp_path):
    names = write_tensors(str(tmp_path), ARRAYS.items(), max_file_bytes=60)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["d"] = names[0]
    path.write_text(json.dumps(index))
    with pytest.raises(DamagedTensorsError, match=f"{names[0]}"):
        TensorFolder(str(tmp_path))
    path.write_text("{}")
    with pytest.raises(DamagedTensorsError, match=re.escape(str(path))):
        TensorFolder(str(tmp_path))


def test_float8_is_read(tmp_path):
    values = np.arange(-6, 6).reshape(3, 4).astype(ml_dtypes.float8_e4m3fn)
    before = np.ones(5, np.float32)
    save_file({"a": before, "x": values}, tmp_path / "model.safetensors")
    with TensorFolder(str(tmp_path)) as tensors:
        read = tensors.read("x")
    assert read.dtype == values.dtype
    np.testing.assert_array_equal(read.astype(np.float32), values.astype(np.float32))


def test_a_dtype_that_is_not_known_is_named(tmp_path):
    save_file({"x": np.zeros(2, ml_dtypes.float8_e5m2)}, tmp_path / "model.safetensors")
    message = r"F8_E5M2.*BF16.*F8_E4M3"
    with pytest.raises(ValueError, match=message), TensorFolder(str(tmp_path)) as tensors:
        tensors.read("x")


def test_a_full_disk_is_one_line_and_leaves_no_part(tmp_path, monkeypatch):
    def full(tensors, path, metadata):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.numpy.save_file", full)
    with pytest.raises(UserError, match=rf"{tmp_path}/model.*No space left on device"):
        write_tensors(str(tmp_path), [("x", np.zeros(3, np.float32))])
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_over(tmp_path):
    write_tensors(str(tmp_path), ARRAYS.items())
    with pytest.raises(FileExistsError, match=str(tmp_path)):
        write_tensors(str(tmp_path), ARRAYS.items())
