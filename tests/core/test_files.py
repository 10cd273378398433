"""Files are written as a whole, with the permissions of new files."""

import os

import pytest

from moelib.core.errors import MissingFileError, UserError
from moelib.core.files import read_json, read_text, readable, write_json


def test_an_error_keeps_the_old_content(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_an_error_with_the_name_of_the_file(tmp_path):
    (tmp_path / f"value.json.tmp-{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/value\.json'"):
        write_json(tmp_path / "value.json", "x" * 100_000)


def test_permissions_are_those_of_a_new_file(tmp_path):
    write_json(tmp_path / "value.json", {"a": 1})
    (tmp_path / "plain").write_text("")
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1


def test_json_comes_back_and_other_content_is_refused(tmp_path):
    path = tmp_path / "value.json"
    assert read_json(path) == {}
    write_json(path, {"a": [1, "ü"]})
    assert read_json(path) == {"a": [1, "ü"]}
    path.write_text("[1]")
    with pytest.raises(UserError, match=os.fspath(path)):
        read_json(path)


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000, '{"a": ', "\x00"])
def test_json_that_cannot_be_parsed_is_one_line(text, tmp_path):
    path = tmp_path / "value.json"
    path.write_text(text)
    with pytest.raises(UserError, match=os.fspath(path)):
        read_json(path)


def test_what_is_no_file_is_one_line(tmp_path):
    with pytest.raises(UserError, match=os.fspath(tmp_path)):
        read_json(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError, match="loop"):
        read_json(tmp_path / "loop")


def test_text_that_cannot_be_read_is_one_line(tmp_path):
    (tmp_path / "a").write_text("\u00e4\r\n")
    assert read_text(tmp_path / "a") == "\u00e4\n"
    with pytest.raises(MissingFileError, match=f"{tmp_path}/b .*No such file"):
        read_text(tmp_path / "b")
    (tmp_path / "a").write_bytes(b"a\xff")
    with pytest.raises(UserError, match=f"{tmp_path}/a .*UTF-8.*position 1"):
        read_text(tmp_path / "a")
    (tmp_path / "c").symlink_to("/proc/self/mem")
    with pytest.raises(UserError, match=f"{tmp_path}/c .*Input/output error"):
        read_text(tmp_path / "c")


def test_errors_of_libraries_about_the_content_are_not_those_of_the_system():
    with pytest.raises(OSError, match=r"^not a file of gzip"), readable("a"):
        raise OSError("not a file of gzip")
