"""Compilation in a subprocess: progress, time limit, and ways to end."""

import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from moelib.planning.compiled import in_subprocess as apart
from moelib.planning.compiled.in_subprocess import CompileOptions, compile_in_subprocess
from tests import tiny
from tests.planning.report.test_step_report import make_report

_REPORT = make_report()

# First lines of a program that replaces the worker: it completes the stage "trace".
_TRACES = """
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
(folder / "request").read_text()
print("trace in 0.5 s (3 top-level equations)", flush=True)
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


def _run(cfg, topology="v6e:2x2", *, name="tiny", on_progress=lambda line: None, **options):
    settings = CompileOptions(**options)
    return compile_in_subprocess(cfg, topology, settings, name=name, on_progress=on_progress)


def test_a_report_comes_back_with_progress(cfg, worker):
    worker(f'(folder / "result").write_text(json.dumps({{"report": {_REPORT.to_json()!r}}}))')
    lines = []
    outcome = _run(cfg, on_progress=lines.append)
    assert outcome.report.to_json() == _REPORT.to_json()
    assert outcome.failure == ""
    assert lines == ["v6e:2x2: trace in 0.5 s (3 top-level equations)"]


def test_the_time_limit_ends_the_worker_and_names_the_cure(cfg):
    outcome = _run(cfg, timeout_seconds=0.5)  # Less than importing JAX takes.
    assert outcome.report is None
    assert "v6e:2x2: the time limit of 0.5 s has passed; " in outcome.failure
    assert outcome.failure.endswith("Set a longer limit, or compile a smaller model.")


def test_the_worker_ends_with_the_process_that_started_it():
    program = "import time; from moelib.planning.compiled import worker; worker.end_with_parent()"
    command = [sys.executable, "-c", f"{program}; time.sleep(600)"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        process.stdin.close()
        assert process.wait(timeout=30) == 1


def test_ctrl_c_ends_the_worker_and_keeps_completed_stages(cfg, worker, tmp_path):
    pid = tmp_path / "pid"
    worker(f"""
    pathlib.Path({str(pid)!r}).write_text(str(os.getpid()))
    print("ready", flush=True)
    time.sleep(600)
    """)

    def interrupt(line):
        if "ready" in line:
            threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT]).start()

    # A background job ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    outcome = _run(cfg, on_progress=interrupt)
    signal.signal(signal.SIGINT, before)
    assert outcome.interrupted
    assert "stopped by Ctrl-C; completed: trace in 0.5 s" in outcome.failure
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_a_crash_of_the_compiler_and_an_error_of_the_step_show_their_last_lines(cfg, worker):
    worker("""
    print("Check failed: rank == 2 (3 vs. 2)", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGABRT)
    """)
    failure = _run(cfg).failure
    assert "crashed with SIGABRT; completed: trace in 0.5 s" in failure
    assert "Check failed: rank == 2" in failure
    worker("raise TypeError('no such dtype')")
    assert "TypeError: no such dtype" in _run(cfg).failure


def test_an_unknown_topology_or_time_limit_starts_nothing(cfg, worker, tmp_path):
    worker(f"pathlib.Path({str(tmp_path / 'started')!r}).touch()")
    for limit in (0, float("inf")):
        with pytest.raises(ValueError, match=f"timeout_seconds={limit}"):
            _run(cfg, timeout_seconds=limit)
    outcome = _run(cfg, "v6f:2x2")
    assert "unknown accelerator 'v6f'" in outcome.failure
    assert not (tmp_path / "started").exists()


@pytest.mark.slow
def test_the_real_worker_compiles_and_refuses(cfg, tmp_path):
    pytest.importorskip("libtpu")
    lines = []
    outcome = _run(cfg, dump_dir=str(tmp_path / "dump"), on_progress=lines.append)
    assert outcome.report is not None, outcome.failure
    assert outcome.report.figures["memory.peak"] > 0
    stages = ["start", "build", "trace", "lower", "compile", "count"]
    assert [line.split()[1] for line in lines] == stages
    assert (tmp_path / "dump/hlo_optimized.txt").read_text().startswith("HloModule")
    cfg.mesh_shape = (1, 3, 1, 1, 1, 1)
    assert "takes 3 devices, but there are 4" in _run(cfg).failure
