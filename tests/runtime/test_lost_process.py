"""Processes that wait for each other, compare their versions, and end together."""

import errno
import socket
import sys
from typing import Any

import pytest

from moelib.runtime import lost_process
from moelib.runtime.lost_process import EXIT_CODE
from moelib.runtime.versions import library_versions
from tests.python_process import finish, free_port, start

_PROGRAM = """
import os, sys, time
from moelib.runtime import lost_process
from moelib.core.errors import UserError

index, num_processes, port, timeout, end = sys.argv[1:]
lost_process._FIRST_REPORT_SECONDS = lost_process._REPORT_SECONDS = 0.1
lost_process._GRACE_SECONDS = 2 if end == 'follow' else 0.5
address = f"localhost:{port}"
versions = "jax 1.0, moelib " + end if end.startswith("0.") else ""
with lost_process.ended_with_others(
    address, int(num_processes), int(index), float(timeout), description=versions
):
    pass
if end == "wait":
    time.sleep(100)
if end == "follow":  # A collective that fails because another process is lost.
    time.sleep(1)
    raise RuntimeError("connection reset")
if end == "kill":
    os.kill(os.getpid(), 9)
if end == "error":
    raise UserError("x.bin cannot be read")
"""


def run(ends, timeout=60):
    """Returns (exit status, stderr) by index of processes that end so; None is not started."""
    port = free_port()
    processes = {
        index: start("-c", _PROGRAM, index, len(ends), port, timeout, end)
        for index, end in enumerate(ends)
        if end is not None
    }
    errors = {index: process.communicate()[1] for index, process in processes.items()}
    return {index: (processes[index].returncode, error) for index, error in errors.items()}


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("ends", [["wait", "error", "wait"], slow(["error", "wait", "wait"])])
def test_an_error_of_one_process_ends_all_with_its_message(ends):
    found = run(ends)
    failed = ends.index("error")
    for index, (status, error) in found.items():
        assert status == (2 if index == failed else EXIT_CODE), error
        line = f"Process {failed} of 3 is lost (UserError: x.bin cannot be read)"
        assert (line in error) == (index != failed)


@pytest.mark.parametrize(
    "ends", [["kill", "wait", "wait"], slow(["wait", "wait", "kill"]), slow(["kill", "follow"])]
)
def test_a_killed_process_ends_all(ends):
    killed = ends.index("kill")
    for index, (status, error) in run(ends).items():
        if index != killed:
            assert status == EXIT_CODE
            assert f"Process {killed} of {len(ends)} is lost, " in error


def test_a_host_that_does_not_answer_is_lost(monkeypatch, capsys):
    class Silent:
        def recv(self, *_):  # As the kernel answers once no probe has been: tcp(7), ETIMEDOUT.
            raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

    ended = []
    monkeypatch.setattr(lost_process, "_GRACE_SECONDS", 0.0)
    monkeypatch.setattr(lost_process.os, "_exit", ended.append)
    monkeypatch.delattr(sys, "last_exc", raising=False)
    peers: Any = {0: Silent()}
    lost_process._Job(1, 2, peers).watch(0)
    assert ended == [EXIT_CODE]
    assert "Process 0 of 2 is lost, " in capsys.readouterr().err


def test_each_process_reports_its_own_error_alone():
    for status, error in run(["error", "error"]).values():
        assert status == 2
        assert "is lost" not in error


def test_processes_may_finish_at_different_times():
    assert [status for status, _ in run(["finish", "finish", "finish"]).values()] == [0, 0, 0]


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        (["wait", None, "wait", None], "no connection from processes 1, 3"),
        slow(["wait", None], "no connection from process 1"),
        ([None, "wait"], "process 0 does not answer at localhost"),
    ],
)
def test_missing_processes_are_named(ends, message):
    found = run(ends, timeout=2)
    for status, error in found.values():
        assert status == 1  # A traceback: no command prints the error.
        assert "UserError" in error
    _, error = found[min(found)]
    assert error.count(f"of {len(ends)} has waited ") > 1  # While it waits, and at the end.
    assert f"has waited 2 s of 2: {message}" in error
    assert "--start_timeout_seconds" in error


def test_processes_with_other_versions_are_refused_by_all():
    for status, error in run(["0.1", "0.1", "0.2"]).values():
        assert status == 1
        assert "Process 2 has moelib 0.2, process 0 moelib 0.1" in error


def test_an_address_that_is_not_free_is_refused():
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
        [(_, err)] = finish(start("-c", _PROGRAM, 0, 2, port, 9, "finish"), code=1)
    assert f"address=localhost:{port}: process 0 cannot listen" in err


def test_libraries_that_affect_the_numbers_have_versions():
    versions = library_versions()
    assert {"python", "moelib", "jax", "orbax-checkpoint"} <= versions.keys()
    assert all(version[0].isdigit() for version in versions.values())
