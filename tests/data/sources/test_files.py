import errno
import gzip
import os

import pyarrow
import pytest
from pyarrow import parquet

from moelib.core.errors import UserError
from moelib.data.sources import files
from moelib.data.sources.files import PythonSourceCode, TextFiles
from moelib.data.sources.source import fingerprint
from moelib.data.sources.source_for_path import source_for_path
from tests.data.sources.test_json_lines import _zstd


def _text_files(*paths: object) -> TextFiles:
    return TextFiles.default_config().set(paths=[str(path) for path in paths]).instantiate()


def test_a_folder_gives_its_text_files_in_order(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.txt").write_bytes("ü\r\n".encode())
    (tmp_path / "a.md").write_text("second")
    (tmp_path / "skipped.bin").write_text("no text")
    assert sorted(_text_files(tmp_path).documents()) == sorted(["second", "ü\r\n"])
    assert list(_text_files(tmp_path / "**" / "*.txt", tmp_path / "a.md").documents()) == [
        "ü\r\n",
        "second",
    ]


def test_a_token_store_next_to_the_texts_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "store" / "parts").mkdir(parents=True)
    for name in (files.STORE_MARK, "b.txt", "parts/c.txt"):
        (tmp_path / "store" / name).write_text("")
    assert list(_text_files(tmp_path).documents()) == ["text"]


def test_many_small_files_are_grouped_and_large_ones_stand_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_MIN_PART_BYTES", 10)
    for index, size in enumerate([4, 4, 4, 50, 1, 1]):
        (tmp_path / f"{index}.txt").write_text(str(index) * size)
    parts = _text_files(tmp_path).parts()
    assert [part.num_bytes for part in parts] == [8, 4, 50, 2]
    assert parts[0].name == f"{tmp_path}/0.txt and 1 more"


def test_a_file_that_is_not_utf8_is_named_with_its_byte(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"latin.txt.*UTF-8: byte 3.*0xe9"):
        list(_text_files(tmp_path).documents())


def test_long_files_are_cut_behind_lines_and_nothing_is_lost(tmp_path):
    text = "one\ntwo two\n" + "x" * 25 + "\nend"
    (tmp_path / "a.txt").write_text(text)
    cfg = TextFiles.default_config().set(paths=[str(tmp_path / "a.txt")], max_document_chars=10)
    documents = [d for part in cfg.instantiate().parts() for d in part.documents()]
    assert documents == ["one\n", "two two\n", "x" * 10, "x" * 10, "x" * 5 + "\nend"]
    with pytest.raises(ValueError, match="max_document_chars=0"):
        cfg.set(max_document_chars=0).instantiate().parts()


def test_paths_that_match_nothing_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="/nothing-here "):
        _text_files(tmp_path / "nothing-here").parts()
    with pytest.raises(FileNotFoundError, match=r".txt, .md, .rst"):
        _text_files(tmp_path).parts()
    with pytest.raises(ValueError, match="paths"):
        _text_files().parts()
    with pytest.raises(FileNotFoundError, match="Python"):
        PythonSourceCode.default_config().set(path=str(tmp_path)).instantiate().parts()


GONE, FAILING = "No such file", "Input/output error"


@pytest.mark.parametrize(
    ("ending", "error"),
    [
        *((each, GONE) for each in ("txt", "jsonl", "jsonl.gz", "jsonl.zst", "parquet", "arrow")),
        *((each, FAILING) for each in ("txt", "jsonl.gz", "jsonl.zst")),
    ],
)
def test_a_file_that_can_no_longer_be_read_is_named(tmp_path, ending, error):
    path = tmp_path / f"text.{ending}"
    table = pyarrow.table({"text": ["a", "b"]})
    if ending == "parquet":
        parquet.write_table(table, path)
    elif ending == "arrow":
        with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    else:
        path.write_text("text")
    (part,) = source_for_path(str(path)).instantiate().parts()
    path.unlink()
    if error == FAILING:
        path.symlink_to("/proc/self/mem")  # Reading its first bytes fails.
    with pytest.raises(UserError, match=f"{path} cannot be read: .*{error}"):
        list(part.documents())


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b").mkdir()
    scandir = os.scandir

    def fail(path: str) -> object:
        if path.endswith("b"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", fail)
    python = PythonSourceCode.default_config().set(path=str(tmp_path)).instantiate()
    for source in (_text_files(tmp_path), python):
        with pytest.raises(UserError, match=f"{tmp_path}/b .*Permission denied"):
            source.parts()


def test_fingerprint_changes_with_a_file(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    before = fingerprint(_text_files(tmp_path).parts())
    assert fingerprint(_text_files(tmp_path).parts()) == before
    for text in ("other", "test"):  # Also of the same size.
        (tmp_path / "a.txt").write_text(text)
        assert fingerprint(_text_files(tmp_path).parts()) != before


def test_python_sources_exclude_packages_and_caches(tmp_path):
    for folder in ("site-packages", "__pycache__", "json"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.py").write_text(f"# {folder}")
    (tmp_path / "a.py").write_bytes(b"# -*- coding: latin-1 -*-\n# \xe9\n")
    (tmp_path / "b.py").write_bytes(b"# \xe9, and no encoding is declared\n")
    source = PythonSourceCode.default_config().set(path=str(tmp_path)).instantiate()
    assert list(source.documents()) == [
        "# -*- coding: latin-1 -*-\n# é\n",
        "# é, and no encoding is declared\n",
        "# json",
    ]


def test_the_standard_library_has_megabytes_of_source():
    source = PythonSourceCode.default_config().instantiate()
    parts = source.parts()
    assert sum(part.num_bytes for part in parts) > 5_000_000
    assert fingerprint(source.parts()) == fingerprint(
        PythonSourceCode.default_config().instantiate().parts()
    )
    assert any("import" in text for text in parts[0].documents())


def test_linked_folders_and_endings_in_capitals_are_read_once(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/a.TXT").write_text("linked")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "texts/same").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/back").symlink_to(tmp_path / "texts")
    source = source_for_path(str(tmp_path / "texts")).instantiate()
    assert list(source.documents()) == ["linked"]


def test_a_file_of_two_names_is_read_once(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    paths = ["a.txt", "./a.txt", str(tmp_path / "a.txt"), "."]
    source = TextFiles.default_config().set(paths=paths).instantiate()
    assert list(source.documents()) == ["text"]


@pytest.mark.parametrize("ending", ["gz", "zst", "GZ"])
def test_a_pattern_selects_compressed_files_and_an_empty_one_is_refused(tmp_path, ending):
    record = b'{"text": "one"}\n'
    packed = _zstd(record) if ending == "zst" else gzip.compress(record)
    (tmp_path / f"a.jsonl.{ending}").write_bytes(packed)
    source = source_for_path(str(tmp_path / f"*.{ending}")).instantiate()
    assert list(source.documents()) == ["one"]
    (tmp_path / f"b.jsonl.{ending}").write_bytes(b"")  # As an aborted transfer leaves it.
    source = source_for_path(str(tmp_path / f"*.{ending}")).instantiate()
    with pytest.raises(UserError, match=r"b\.jsonl.* cannot .*no bytes.*fetch it again"):
        list(source.documents())
