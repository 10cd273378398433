"""Compilation of a step in a subprocess, with a time limit and progress.

A crash of the compiler then ends nothing else, and each process compiles for one kind of GPU.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from moelib.core import config_paths
from moelib.core.errors import UserError
from moelib.planning.hardware.topologies import describe
from moelib.planning.report.step_report import StepReport

WORKER = (sys.executable, "-m", "moelib.planning.compiled.worker")

_DONE = {  # Stages of the worker, in the past tense.
    "start": "started",
    "build": "built the trainer",
    "trace": "traced",
    "lower": "lowered",
    "compile": "compiled",
    "count": "counted",
}
_NUM_LAST_LINES = 12  # Lines of stderr in an error message.


@dataclasses.dataclass(frozen=True)
class CompileOptions:
    """Settings of a compilation."""

    compiler_options: Mapping[str, str] = dataclasses.field(default_factory=dict)  # Additional.
    timeout_seconds: float | None = None  # Time limit per step; None for none.
    dump_dir: str | None = None  # Folder for the step at each stage.

    def __post_init__(self) -> None:
        if self.timeout_seconds is not None and not self.timeout_seconds > 0:
            raise UserError(f"timeout_seconds={self.timeout_seconds}: set a time above 0.")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of compiling a step."""

    report: StepReport | None
    failure: str = ""  # Reason if there is no report.
    stages: Mapping[str, float] = dataclasses.field(default_factory=dict)  # Seconds by stage.
    out_of_memory: bool = False  # Whether the step needs more memory than the device has.
    interrupted: bool = False  # Whether Ctrl-C stopped it.


_DEFAULT_OPTIONS = CompileOptions()


def compile_in_subprocess(
    cfg: Any,
    topology_name: str,
    options: CompileOptions = _DEFAULT_OPTIONS,
    *,
    name: str,
    on_progress: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Returns the outcome of compiling a trainer config's step for a topology, as `name`.

    An impossible plan, too much memory, a timeout, Ctrl-C and a crash are outcomes, not errors;
    the failure contains the results of the stages before. `on_progress` gets a line per stage.
    """
    try:
        describe(topology_name)
    except UserError as error:
        return Outcome(None, str(error))
    request = {
        "config": config_paths.to_text(cfg),
        "topology": topology_name,
        "compiler_options": dict(options.compiler_options),
        "name": name,
        "dump_dir": options.dump_dir and os.path.abspath(options.dump_dir),
    }
    run = _Run(topology_name, options.timeout_seconds, on_progress)
    result = run.result_of(request)
    if isinstance(result, str):
        return Outcome(None, result, run.stages, interrupted=run.interrupted)
    if "failure" in result:
        return Outcome(None, stages=run.stages, **result)
    return Outcome(StepReport.from_json(result["report"]), "", run.stages)


class _Run:
    """A run of the worker."""

    def __init__(
        self, topology_name: str, timeout_seconds: float | None, tell: Callable[[str], None]
    ) -> None:
        self.stages: dict[str, float] = {}
        self.interrupted = False
        self._topology, self._timeout, self._tell = topology_name, timeout_seconds, tell
        self._lines: list[str] = []
        self._begin = time.perf_counter()
        self._timed_out = False

    def result_of(self, request: Mapping[str, Any]) -> dict[str, Any] | str:
        """Returns the worker's result, or the reason why there is none."""
        with tempfile.TemporaryDirectory(prefix="moelib-plan-") as name:
            folder = pathlib.Path(name)
            (folder / "request").write_text(json.dumps(request), encoding="utf-8")
            with open(folder / "stderr", "wb") as stderr, _start(folder, stderr) as process:
                reason = self._follow(process)
            if reason is not None:
                text = (folder / "stderr").read_text(encoding="utf-8", errors="replace")
                return self._failure(reason, text)
            return json.loads((folder / "result").read_text(encoding="utf-8"))

    def _follow(self, process: subprocess.Popen) -> str | None:
        """Waits for the worker; returns the reason if it has no result."""
        timer = threading.Timer(self._timeout or 0, self._time_out, [process])
        if self._timeout is not None:
            timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                self._read_line(line.rstrip("\n"))
            code = process.wait()
        except KeyboardInterrupt:
            self.interrupted = True
            return "stopped by Ctrl-C"
        finally:
            timer.cancel()
            if process.poll() is None:
                _kill(process)
            process.wait()
        if self._timed_out:
            return f"the time limit of {self._timeout:g} s has passed"
        if code < 0:
            return f"the compiler crashed with {signal.Signals(-code).name}"
        return None if code == 0 else f"the process of the compiler ended with code {code}"

    def _time_out(self, process: subprocess.Popen) -> None:
        self._timed_out = True
        _kill(process)

    def _read_line(self, line: str) -> None:
        """Reads a line of the worker: the end of a stage, or the output of a library."""
        try:
            message = json.loads(line)
            stage, seconds = message["stage"], float(message["seconds"])
            self._lines.append(f"{_DONE[stage]} in {seconds:.1f} s ({message['detail']})")
        except (ValueError, TypeError, KeyError):
            self._tell(line)
            return
        self.stages[stage] = seconds
        self._tell(f"{self._topology}: {self._lines[-1]}")

    def _failure(self, reason: str, stderr: str) -> str:
        """Returns the error message, and counts the time since the last stage for the next one."""
        cut = next((stage for stage in _DONE if stage not in self.stages), "count")
        spent = time.perf_counter() - self._begin - sum(self.stages.values())
        self.stages[cut] = self.stages.get(cut, 0) + spent
        before = ", ".join(self._lines) or "no stage was completed"
        message = f"topology {self._topology}: {reason}: {before}; then {cut} ran {spent:.1f} s."
        if self._timed_out:
            return f"{message} Set a longer limit, or compile a smaller model."
        last = [line for line in stderr.splitlines() if line.strip()][-_NUM_LAST_LINES:]
        return "\n".join([message, *(f"  {line}" for line in last)])


def _start(folder: pathlib.Path, stderr: Any) -> subprocess.Popen:
    """Starts a worker in its own group of processes, which can be ended together."""
    # The worker imports the same modules, those that the config names.
    paths = [os.getcwd(), *(path for path in sys.path if path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
    return subprocess.Popen(
        [*WORKER, str(folder / "request"), str(folder / "result")],
        stdout=subprocess.PIPE,
        stderr=stderr,
        stdin=subprocess.PIPE,  # Closed when this process ends, which ends the worker.
        env=environment,
        text=True,
        start_new_session=True,
    )


def _kill(process: subprocess.Popen) -> None:
    """Ends the worker and all processes that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
