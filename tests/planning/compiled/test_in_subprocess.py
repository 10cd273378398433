"""Compilation in a subprocess: progress, time limit, and ways to end."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from moelib.planning.compiled import in_subprocess as apart
from moelib.planning.compiled.in_subprocess import CompileOptions, compile_in_subprocess
from tests import tiny
from tests.planning.report.test_step_report import make_report

_REPORT = make_report()

# First lines of a program that replaces the worker: it completes the stage "trace".
_TRACES = """
import json, os, pathlib, signal, subprocess, sys, time
request = json.loads(pathlib.Path(sys.argv[1]).read_text())
def tell(stage, detail):
    print(json.dumps({"stage": stage, "seconds": 0.5, "detail": detail}), flush=True)
tell("start", "4 devices described")
tell("build", "fsdp 4")
tell("trace", "3 top-level equations")
"""


@pytest.fixture
def cfg(tmp_path):
    return tiny.trainer_config(tmp_path, evaler=False)


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Returns a function that replaces the worker by a program."""

    def put(rest):
        path = tmp_path / "worker.py"
        path.write_text(_TRACES + textwrap.dedent(rest))
        monkeypatch.setattr(apart, "WORKER", (sys.executable, str(path)))

    return put


def _reports(count):
    return f"""
    with open({str(count)!r}, "a") as file:
        file.write("x")
    print("a library greets")
    report = {_REPORT.to_json()!r}
    pathlib.Path(sys.argv[2]).write_text(json.dumps({{"report": report}}))
    """


def _run(cfg, topology="v6e:2x2", *, name="tiny", on_progress=lambda line: None, **options):
    settings = CompileOptions(**options)
    return compile_in_subprocess(cfg, topology, settings, name=name, on_progress=on_progress)


def test_a_report_comes_back_with_its_stages_and_progress(cfg, worker, tmp_path):
    worker(_reports(tmp_path / "count"))
    lines = []
    outcome = _run(cfg, on_progress=lines.append)
    assert outcome.report == _REPORT
    assert outcome.failure == ""
    assert outcome.stages == {"start": 0.5, "build": 0.5, "trace": 0.5}
    assert "v6e:2x2: traced in 0.5 s (3 top-level equations)" in lines
    assert "a library greets" in lines


def test_the_time_limit_ends_all_processes_and_keeps_completed_stages(cfg, worker, tmp_path):
    pid = tmp_path / "pid"
    worker(f"""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path({str(pid)!r}).write_text(str(child.pid))
    time.sleep(600)
    """)
    outcome = _run(cfg, timeout_seconds=2.0)
    assert outcome.report is None
    assert "v6e:2x2: the time limit of 2 s has passed: " in outcome.failure
    assert "traced in 0.5 s (3 top-level equations); then lower ran" in outcome.failure
    assert list(outcome.stages) == ["start", "build", "trace", "lower"]
    assert _has_ended(int(pid.read_text()))


def _has_ended(pid):
    """Returns whether a process ends within five seconds; one that waits to be reaped has."""
    for _ in range(50):
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.1)
    return False


def test_a_worker_ends_with_the_process_that_started_it():
    program = "import time; from moelib.planning.compiled import worker; worker.end_with_parent()"
    command = [sys.executable, "-c", f"{program}; time.sleep(600)"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as process:
        process.stdin.close()
        assert process.wait(timeout=30) == -signal.SIGKILL


def test_ctrl_c_stops_it_and_keeps_completed_stages(cfg, worker):
    worker("time.sleep(600)")

    def interrupt(line):
        if "traced" in line:
            threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT]).start()

    # A background job ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    outcome = _run(cfg, on_progress=interrupt)
    signal.signal(signal.SIGINT, before)
    assert outcome.interrupted
    assert "stopped by Ctrl-C" in outcome.failure
    assert "traced in 0.5 s" in outcome.failure


def test_a_crash_of_the_compiler_and_an_error_of_the_step_show_their_last_lines(cfg, worker):
    worker("""
    print("Check failed: rank == 2 (3 vs. 2)", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGABRT)
    """)
    failure = _run(cfg).failure
    assert "crashed with SIGABRT" in failure
    assert "Check failed: rank == 2" in failure
    worker("raise TypeError('no such dtype')")
    assert "TypeError: no such dtype" in _run(cfg).failure


def test_an_unknown_topology_or_time_limit_starts_nothing(cfg, worker, tmp_path):
    worker(_reports(tmp_path / "count"))
    with pytest.raises(ValueError, match="timeout_seconds=0"):
        _run(cfg, timeout_seconds=0)
    outcome = _run(cfg, "v6f:2x2")
    assert "unknown accelerator 'v6f'" in outcome.failure
    assert not (tmp_path / "count").exists()


@pytest.mark.slow
def test_the_real_worker_compiles_and_refuses(cfg, tmp_path):
    pytest.importorskip("libtpu")
    outcome = _run(cfg, dump_dir=str(tmp_path / "dump"))
    assert outcome.report is not None, outcome.failure
    assert outcome.report.figures["memory.peak"] > 0
    assert list(outcome.stages) == ["start", "build", "trace", "lower", "compile", "count"]
    assert (tmp_path / "dump/hlo_optimized.txt").read_text().startswith("HloModule")
    cfg.mesh_shape = (1, 3, 1, 1, 1, 1)
    assert "takes 3 devices, but there are 4" in _run(cfg).failure
