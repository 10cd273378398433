"""Leases on a server of S3's protocol: one holder at a time, taken over when stale."""

import os
import signal
import time

import pytest

from moelib.core.errors import UserError
from moelib.runtime import lock as lock_module
from moelib.runtime import storage
from moelib.runtime.lock import DirectoryInUseError, directory_lock


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    monkeypatch.setattr(lock_module, "RENEW_SECONDS", 0.1)
    monkeypatch.setattr(lock_module, "STALE_SECONDS", 1.5)


@pytest.fixture
def signals(monkeypatch):
    sent = []
    monkeypatch.setattr(lock_module.os, "kill", lambda *args: sent.append(args))
    return sent


def lock(url):
    return directory_lock(url, setting="dir (--trainer_dir)")


def test_a_second_holder_is_refused_and_the_first_named(s3):
    with (
        lock(f"{s3}/run") as check,
        pytest.raises(DirectoryInUseError, match=f"{s3}/run .*process {os.getpid()} on .*dir"),
        lock(f"{s3}/run"),
    ):
        pass
    with lock(f"{s3}/run") as check:
        check()
    assert not storage.exists(f"{s3}/run/.lock-000001")


def test_a_stale_one_is_taken_over_and_its_holder_stops(s3, signals):
    storage.write_bytes(f"{s3}/run/.lock-000007", b"process 1 on nowhere")
    with lock(f"{s3}/run") as check:
        assert storage.list_names(f"{s3}/run") == [".lock-000008"]
        check()
        storage.write_bytes(f"{s3}/run/.lock-000009", b"process 2 on nowhere")
        with pytest.raises(UserError, match=r"/run was taken over"):
            check()
        time.sleep(0.5)
        assert signals == [(os.getpid(), signal.SIGTERM)]
        assert storage.read_bytes(f"{s3}/run/.lock-000009") == b"process 2 on nowhere"


def test_of_two_that_take_over_one_succeeds(s3, monkeypatch):
    storage.write_bytes(f"{s3}/run/.lock-000001", b"process 1 on nowhere")
    wait = lock_module._wait_until_stale

    def wait_and_be_late(directory, number, setting):
        wait(directory, number, setting)
        storage.write_bytes(f"{directory}/.lock-000002", b"process 2 on nowhere")

    monkeypatch.setattr(lock_module, "_wait_until_stale", wait_and_be_late)
    with pytest.raises(DirectoryInUseError, match="process 2 on nowhere"), lock(f"{s3}/run"):
        pass


def test_a_store_without_conditional_writes_is_a_warning(s3, monkeypatch, caplog):
    write = storage.write_bytes
    monkeypatch.setattr(
        storage, "write_bytes", lambda path, data, only_if_absent=False: write(path, data)
    )
    with lock(f"{s3}/run"):
        assert "cannot be locked" in caplog.text


def test_a_missing_bucket_is_an_error_of_the_user(s3):
    with (
        pytest.raises(UserError, match=r"-missing/run.*no such object or bucket"),
        lock(f"{s3}-missing/run"),
    ):
        pass


def test_a_lease_left_below_the_highest_blocks_nobody(s3):
    for number in (1, 2):
        storage.write_bytes(f"{s3}/run/.lock-{number:06d}", b"process 1 on a host that crashed")
    with lock(f"{s3}/run"):
        assert storage.list_names(f"{s3}/run") == [".lock-000003"]
