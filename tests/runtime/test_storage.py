"""Files and objects under one set of names: content, growth, errors that name the URL."""

import builtins
import contextlib
import subprocess
import sys
import threading

import pytest

from moelib.core.errors import MissingFileError, UserError
from moelib.runtime import storage
from moelib.runtime.storage import atomic_file, copy_file, read_json, read_text, write_json


def test_objects_are_written_as_a_whole_and_listed(s3, tmp_path):
    url = f"{s3}/a/b.json"
    assert read_json(url) == {}
    write_json(url, {"x": 1})
    assert read_json(url) == {"x": 1}
    with contextlib.suppress(KeyError), atomic_file(url) as file:
        file.write("half")
        raise KeyError
    assert read_json(url) == {"x": 1}
    assert storage.list_names(f"{s3}/a") == ["b.json"]
    assert storage.exists(f"{s3}/a")
    assert storage.read_bytes(url, 1, 5) == read_text(url).encode()[1:5]
    copy_file(url, str(tmp_path / "c.json"))
    assert read_json(tmp_path / "c.json") == {"x": 1}
    with pytest.raises(FileExistsError):
        storage.write_bytes(url, b"", only_if_absent=True)
    storage.remove_tree(f"{s3}/a")
    assert not storage.exists(f"{s3}/a")
    storage.remove(url)
    with pytest.raises(MissingFileError, match=url):
        read_text(url)


def test_an_object_that_grows_is_uploaded_by_flush_and_close(s3):
    url = f"{s3}/run/lines"
    with storage.open_to_append(url) as file:
        file.write(b"one\n")
        assert not storage.exists(url)
        file.flush_soon()
        file._uploads[0].result()
        assert storage.read_bytes(url) == b"one\n"
        file.write(b"two\n")
    with storage.open_to_append(url) as file:
        file.write(b"three\n")
    assert storage.read_bytes(url) == b"one\ntwo\nthree\n"


def test_a_flush_during_an_upload_follows_it(s3, monkeypatch):
    url, going_on, write_bytes = f"{s3}/run/lines", threading.Event(), storage.write_bytes

    def slow(path, data):
        assert going_on.wait(60)
        write_bytes(path, data)

    monkeypatch.setattr(storage, "write_bytes", slow)
    with storage.open_to_append(url) as file:
        for line in (b"one\n", b"two\n", b"three\n"):
            file.write(line)
            file.flush_soon()
        uploads = list(file._uploads)
        assert len(uploads) == 2
        going_on.set()
        uploads[-1].result()
        assert storage.read_bytes(url) == b"one\ntwo\nthree\n"


def test_a_failed_upload_is_raised_by_the_next(s3, monkeypatch):
    file = storage.open_to_append(f"{s3}-missing/lines")
    monkeypatch.setattr(storage, "_UPLOAD_SECONDS", 0.0)
    file.flush_soon()
    file.write(b"one\n")
    file.flush_soon()
    with contextlib.suppress(OSError):
        file._uploads[0].result()
    with pytest.raises(FileNotFoundError, match="-missing/lines"):
        file.flush_soon()
    with pytest.raises(FileNotFoundError, match="-missing/lines"):
        file.close()


@pytest.mark.parametrize(("scheme", "extra"), [("s3", "s3"), ("gs", "gcs")])
def test_a_missing_package_is_named(monkeypatch, scheme, extra):
    import fsspec

    def missing(name, **options):
        raise ImportError(name)

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(UserError, match=rf"{scheme}://b.*pip install 'moelib\[{extra}\]'"):
        storage.exists(f"{scheme}://b/run")


def test_an_unknown_scheme_is_refused():
    with pytest.raises(UserError, match="quantum://b"):
        storage.exists("quantum://b/run")


def test_a_wrong_endpoint_and_a_missing_permission_name_the_object(s3, monkeypatch):
    import s3fs

    async def denied(*args, **options):
        raise PermissionError("Access Denied")

    with monkeypatch.context() as changed:
        changed.setattr(s3fs.S3FileSystem, "_cat_file", denied)
        s3fs.S3FileSystem.clear_instance_cache()
        with pytest.raises(UserError, match=f"{s3}/x cannot be read: Access Denied"):
            read_text(f"{s3}/x")
        changed.undo()
        changed.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        changed.setenv("AWS_MAX_ATTEMPTS", "1")
        s3fs.S3FileSystem.clear_instance_cache()
        with pytest.raises(UserError, match=r"s3://b/x cannot be read: Could not connect.*:9"):
            read_text("s3://b/x")
    s3fs.S3FileSystem.clear_instance_cache()


def test_local_paths_need_no_package(tmp_path, monkeypatch):
    load = builtins.__import__

    def refuse(name, *args, **options):
        assert name != "fsspec"
        return load(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    path = str(tmp_path / "folder" / "file")
    with storage.open_to_append(path) as file:
        file.write(b"x")
    with storage.open_to_read(path) as file:
        assert file.read() == "x"
    assert storage.list_names(str(tmp_path)) == ["folder"]


def test_a_standard_stream_that_is_redirected_keeps_what_its_file_has(tmp_path):
    path = tmp_path / "out"
    path.write_text("kept\n")
    code = (
        "from moelib.runtime.storage import write_json\n"
        "print('before'); write_json('/dev/stdout', {'x': 1}); print('after')"
    )
    with path.open("a") as file:
        subprocess.run([sys.executable, "-c", code], stdout=file, check=True)
    assert path.read_text() == 'kept\nbefore\n{\n  "x": 1\n}\nafter\n'
