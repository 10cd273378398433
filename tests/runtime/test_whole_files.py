"""Files are written as a whole, with the permissions of new files."""

import os

import pytest

from moelib.core.errors import MissingFileError, UserError
from moelib.runtime.storage import read_json, read_text, readable, write_json


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


def test_a_pipe_is_written_to_and_stays(tmp_path):
    os.mkfifo(path := tmp_path / "pipe")  # As /dev/stdout may be; /dev/null is a device.
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    write_json(path, [1])
    assert path.is_fifo()
    assert os.read(reader, 100) == b"[\n  1\n]\n"
    os.close(reader)


def test_json_comes_back(tmp_path):
    path = tmp_path / "value.json"
    assert read_json(path) == {}
    write_json(path, {"a": [1, "ü"]})
    assert read_json(path) == {"a": [1, "ü"]}


@pytest.mark.parametrize("text", ["[1]", "[" * 100_000, "9" * 5000, '{"a": ', "\x00"])
def test_json_that_is_no_object_is_one_line(text, tmp_path):
    path = tmp_path / "value.json"
    path.write_text(text)
    with pytest.raises(UserError, match=os.fspath(path)):
        read_json(path)


def test_a_path_that_cannot_be_read_is_one_line(tmp_path):
    (tmp_path / "text").write_text("\u00e4\r\n")
    assert read_text(tmp_path / "text") == "\u00e4\n"
    (tmp_path / "bytes").write_bytes(b"a\xff")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "memory").symlink_to("/proc/self/mem")
    for path, error, named in (
        ("absent", MissingFileError, "absent .*No such file"),
        ("bytes", UserError, "bytes .*UTF-8.*position 1"),
        ("loop", UserError, "loop"),
        ("memory", UserError, "memory .*Input/output error"),
        ("", UserError, ""),
    ):
        with pytest.raises(error, match=f"{tmp_path}/?{named}"):
            read_text(tmp_path / path)


def test_errors_of_libraries_about_the_content_are_not_those_of_the_system():
    with pytest.raises(OSError, match=r"^not a file of gzip"), readable("a"):
        raise OSError("not a file of gzip")
