"""Compilation of a step in a subprocess, with a time limit and progress.

A crash of the compiler then ends nothing else, and each process compiles for one kind of GPU.
"""

import dataclasses
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from moelib.core import config_text
from moelib.core.errors import UserError
from moelib.planning.hardware.topologies import describe
from moelib.planning.report.step_report import StepReport

WORKER = (sys.executable, "-m", "moelib.planning.compiled.worker")
_NUM_LAST_LINES = 12  # Lines of stderr in an error message.


@dataclasses.dataclass(frozen=True)
class CompileOptions:
    """Settings of a compilation."""

    compiler_options: Mapping[str, str] = dataclasses.field(default_factory=dict)  # Additional.
    timeout_seconds: float | None = None  # Time limit per step; None for none.
    dump_dir: str | None = None  # Folder for the step at each stage.

    def __post_init__(self) -> None:
        if self.timeout_seconds is not None and not 0 < self.timeout_seconds < math.inf:
            raise UserError(f"timeout_seconds={self.timeout_seconds}: set a finite time above 0.")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of compiling a step."""

    report: StepReport | None
    failure: str = ""  # Reason if there is no report.
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
    the failure names the stages before. `on_progress` gets a line per stage.
    """
    try:
        describe(topology_name)
    except UserError as error:
        return Outcome(None, str(error))
    request = {
        "config": config_text.to_text(cfg),
        "topology": topology_name,
        "timeout_seconds": options.timeout_seconds,
        "compiler_options": dict(options.compiler_options),
        "name": name,
        "dump_dir": options.dump_dir and os.path.abspath(options.dump_dir),
    }
    stages: list[str] = []

    def tell(line: str) -> None:
        stages.append(line)
        on_progress(f"{topology_name}: {line}")

    with tempfile.TemporaryDirectory(prefix="moelib-plan-") as path:
        folder = pathlib.Path(path)
        (folder / "request").write_text(json.dumps(request), encoding="utf-8")
        code = _run(folder, tell)
        if code == 0:
            result = json.loads((folder / "result").read_text(encoding="utf-8"))
            report = result.pop("report", None)
            return Outcome(report and StepReport.from_json(report), **result)
        stderr = (folder / "stderr").read_text(encoding="utf-8", errors="replace")
    done = ", ".join(stages) or "no stage"
    failure = f"topology {topology_name}: {_reason(code, options)}; completed: {done}."
    if code is None:
        return Outcome(None, failure, interrupted=True)
    if code == -signal.SIGALRM:
        return Outcome(None, f"{failure} Set a longer limit, or compile a smaller model.")
    last = [line for line in stderr.splitlines() if line.strip()][-_NUM_LAST_LINES:]
    return Outcome(None, "\n  ".join([failure, *last]))


def _run(folder: pathlib.Path, tell: Callable[[str], None]) -> int | None:
    """Runs the worker, and tells the lines that it prints; returns its status, None on Ctrl-C."""
    # The worker imports the same modules, those that the config names.
    paths = [os.getcwd(), *(path for path in sys.path if path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
    with (
        open(folder / "stderr", "wb") as stderr,
        subprocess.Popen(
            [*WORKER, str(folder)],
            stdin=subprocess.PIPE,  # Closed when this process ends, which ends the worker.
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment,
            text=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            for line in process.stdout:
                tell(line.rstrip("\n"))
            return process.wait()
        except KeyboardInterrupt:
            return None
        finally:
            process.kill()


def _reason(code: int | None, options: CompileOptions) -> str:
    if code is None:
        return "stopped by Ctrl-C"
    if code == -signal.SIGALRM:
        return f"the time limit of {options.timeout_seconds:g} s has passed"
    if code < 0:
        return f"the compiler crashed with {signal.Signals(-code).name}"
    return f"the process of the compiler ended with code {code}"
