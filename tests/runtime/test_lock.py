"""One process per folder at a time."""

import errno
import fcntl
import functools
import socket
import subprocess
import sys
import threading

import pytest

from moelib.core.errors import UserError
from moelib.runtime.lock import DirectoryInUseError, is_locked
from moelib.runtime.lock import directory_lock as lock

directory_lock = functools.partial(lock, setting="dir (--trainer_dir)")


def test_looking_at_a_lock_leaves_it_as_it_is_and_disturbs_no_start(tmp_path):
    assert not is_locked(str(tmp_path))
    assert not list(tmp_path.iterdir())
    with directory_lock(str(tmp_path)):
        assert is_locked(str(tmp_path))
        with pytest.raises(DirectoryInUseError):
            directory_lock(str(tmp_path)).__enter__()
    assert not is_locked(str(tmp_path))
    with open(tmp_path / ".lock", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # As `is_locked` does, for longer.
        threading.Timer(0.02, fcntl.flock, (file, fcntl.LOCK_UN)).start()
        with directory_lock(str(tmp_path)):
            pass


def test_removed_or_replaced_lock_is_an_error(tmp_path):
    with directory_lock(str(tmp_path)) as check:
        check()
        (tmp_path / ".lock").unlink()
        with pytest.raises(UserError, match=f"{tmp_path.name} was moved, or its .lock removed"):
            check()
        with directory_lock(str(tmp_path)), pytest.raises(UserError, match=r"\.lock removed"):
            check()


def test_a_lock_that_is_not_text_or_a_link_is_refused(tmp_path):
    second = directory_lock(str(tmp_path))
    with directory_lock(str(tmp_path)):
        (tmp_path / ".lock").write_bytes(b"\xff")
        with pytest.raises(DirectoryInUseError, match="\ufffd"):
            second.__enter__()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "precious")
    (tmp_path / "precious").write_text("kept")
    with pytest.raises(UserError, match=r"run/\.lock"), directory_lock(str(tmp_path / "run")):
        pass
    assert (tmp_path / "precious").read_text() == "kept"


def test_folder_is_free_after_a_failure(tmp_path):
    with pytest.raises(KeyError), directory_lock(str(tmp_path)):
        raise KeyError
    with directory_lock(str(tmp_path)):
        pass


def test_folder_is_free_after_its_process_is_killed(tmp_path):
    code = (
        "import os, signal\n"
        "from moelib.runtime.lock import directory_lock\n"
        f"with directory_lock({str(tmp_path)!r}, setting='dir'):\n"
        "    print('locked', flush=True)\n"
        "    signal.pause()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "locked\n"
        with (
            pytest.raises(DirectoryInUseError, match=f"process {process.pid} "),
            directory_lock(str(tmp_path)),
        ):
            pass
    finally:
        process.kill()
        process.communicate()
    with directory_lock(str(tmp_path)):
        pass


def test_full_disk_names_the_lock(tmp_path, monkeypatch):
    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(socket, "gethostname", full)  # As the write after it fails.
    with pytest.raises(OSError, match=rf"No space.*{tmp_path}/\.lock"), directory_lock(tmp_path):
        pass


@pytest.mark.parametrize("path", ["file", "file/run"])
def test_folder_that_cannot_be_created_is_refused(tmp_path, path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match=f"{path}'.*trainer_dir"),
        directory_lock(str(tmp_path / path)),
    ):
        pass
