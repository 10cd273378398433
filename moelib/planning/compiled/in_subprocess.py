"""Compiles a step in a process of its own: with a time limit, progress, and a cache.

A crash of the compiler then ends nothing else, and a process compiles for one kind of GPU only.
"""

import contextlib
import dataclasses
import json
import logging
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
from moelib.planning.compiled import cache as report_cache
from moelib.planning.hardware.topologies import PlanError, describe
from moelib.planning.report.step_report import StepReport

WORKER = (sys.executable, "-m", "moelib.planning.compiled.worker")

_DOING = {
    "start": "started",
    "build": "built the trainer",
    "trace": "traced",
    "lower": "lowered",
    "compile": "compiled",
    "count": "counted",
}
_LAST_LINES = 12
_NUM_COSTLIEST = 200  # More than anybody reads, so that asking for more compiles nothing anew.

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of compiling a step.

    Attributes:
        report: Of the step, or None if there is none.
        failure: Why there is none; empty if there is one.
        stages: Seconds of each stage of the compile, the last one cut short by a failure.
        from_cache: Whether it was compiled before.
        out_of_memory: Whether the compiler refused it for the memory that it takes.
        interrupted: Whether Ctrl-C stopped it.
    """

    report: StepReport | None
    failure: str
    stages: Mapping[str, float]
    from_cache: bool
    out_of_memory: bool = False
    interrupted: bool = False


def compile_apart(
    cfg: Any,
    topology_name: str,
    *,
    name: str,
    compiler_options: Mapping[str, str] | None = None,
    timeout_seconds: float | None = None,
    cache_dir: str | None = report_cache.DEFAULT_DIR,
    dump_dir: str | None = None,
    on_progress: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Returns what came of compiling a config's training step for a topology.

    What cannot be planned, does not fit, takes too long, is stopped by Ctrl-C or crashes is an
    outcome, not an error: its failure says what was learnt until then.

    Args:
        cfg: A `SpmdTrainer.Config`.
        topology_name: For what to compile.
        name: What the report calls the step.
        compiler_options: Over those that the trainer compiles with.
        timeout_seconds: When to give up; None for never.
        cache_dir: Where reports are kept, and what `plan_step` refused; None for nowhere.
        dump_dir: Where to write what the step is at each stage; it is then compiled anew.
        on_progress: Told of each stage that is done, in a line.

    Raises:
        ValueError: If the time limit is not above 0.
    """
    if timeout_seconds is not None and not timeout_seconds > 0:
        raise ValueError(
            f"timeout_seconds is {timeout_seconds}; set a time above 0, or None for no limit."
        )
    try:
        describe(topology_name)
    except PlanError as error:
        return Outcome(None, str(error), {}, from_cache=False)
    request = {
        "config": config_paths.to_text(cfg),
        "topology": topology_name,
        "compiler_options": dict(compiler_options or {}),
        "num_costliest": _NUM_COSTLIEST,
    }
    key = report_cache.key(request)
    if cache_dir is not None and dump_dir is None:
        kept = report_cache.read(cache_dir, key)
        if kept is not None and (outcome := _outcome(kept, name, cache_dir)) is not None:
            return outcome
    request |= {"name": name, "dump_dir": None if dump_dir is None else os.path.abspath(dump_dir)}
    run = _Run(topology_name, timeout_seconds, on_progress)
    result = run.result_of(request)
    if isinstance(result, str):
        return Outcome(None, result, run.stages, from_cache=False, interrupted=run.interrupted)
    kept = {**result, "stages": run.stages}
    if cache_dir is not None:
        report_cache.write(cache_dir, key, kept)
    outcome = _outcome(kept, name, None)
    assert outcome is not None
    return outcome


def _outcome(kept: Mapping[str, Any], name: str, cache_dir: str | None) -> Outcome | None:
    """Returns the outcome of a worker's result; None, with a warning, if the cache's is damaged."""
    try:
        stages, failure = kept["stages"], kept.get("failure", "")
        report = None if failure else StepReport.from_json(json.dumps(kept["report"]))
    except (KeyError, TypeError, AttributeError) as error:
        if cache_dir is None:
            raise
        return report_cache.warn_damaged(cache_dir, repr(error))
    if report is not None:
        report = dataclasses.replace(report, name=name)
    out_of_memory = bool(kept.get("out_of_memory"))
    return Outcome(report, failure, stages, cache_dir is not None, out_of_memory)


class _Run:
    """One run of a worker, and what is known of it so far."""

    def __init__(
        self, topology_name: str, timeout_seconds: float | None, tell: Callable[[str], None]
    ) -> None:
        self.stages: dict[str, float] = {}
        self.interrupted = False
        self._topology, self._timeout, self._tell = topology_name, timeout_seconds, tell
        self._lines: list[str] = []
        self._begin = time.perf_counter()
        self._too_late = False

    def result_of(self, request: Mapping[str, Any]) -> dict[str, Any] | str:
        """Returns what the worker wrote, or why it wrote nothing."""
        with tempfile.TemporaryDirectory(prefix="moelib-plan-") as folder:
            place = pathlib.Path(folder)
            (place / "request").write_text(json.dumps(request), encoding="utf-8")
            with open(place / "stderr", "wb") as stderr, _start(place, stderr) as process:
                stopped = self._follow(process)
            if stopped is not None:
                said = (place / "stderr").read_text(encoding="utf-8", errors="replace")
                return self._failure(stopped, said)
            return json.loads((place / "result").read_text(encoding="utf-8"))

    def _follow(self, process: subprocess.Popen) -> str | None:
        """Waits for the worker, and returns why it has no result, or None if it has."""
        timer = threading.Timer(self._timeout or 0, self._give_up, [process])
        if self._timeout is not None:
            timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                self._note(line.rstrip("\n"))
            code = process.wait()
        except KeyboardInterrupt:
            self.interrupted = True
            return "stopped by Ctrl-C"
        finally:
            timer.cancel()
            if process.poll() is None:
                _kill(process)
            process.wait()
        if self._too_late:
            return f"not done after the time limit of {self._timeout:g} s"
        if code < 0:
            return f"the compiler crashed with {signal.Signals(-code).name}"
        return None if code == 0 else f"the process that compiles ended with code {code}"

    def _give_up(self, process: subprocess.Popen) -> None:
        self._too_late = True
        _kill(process)

    def _note(self, line: str) -> None:
        """Takes in a line of the worker: of a stage, or whatever a library prints."""
        try:
            told = json.loads(line)
            stage, seconds, said = told["stage"], float(told["seconds"]), told["said"]
        except (ValueError, TypeError, KeyError):
            self._tell(line)
            return
        self.stages[stage] = seconds
        self._lines.append(f"{_DOING[stage]} in {seconds:.1f} s ({said})")
        self._tell(f"{self._topology}: {self._lines[-1]}")

    def _failure(self, reason: str, stderr: str) -> str:
        """Returns what to say, and books the time since the last stage under the one cut short."""
        cut = next((stage for stage in _DOING if stage not in self.stages), "count")
        spent = time.perf_counter() - self._begin - sum(self.stages.values())
        self.stages[cut] = self.stages.get(cut, 0) + spent
        known = f"{', '.join(self._lines) or 'nothing was done before'}; then {cut} took"
        message = f"topology {self._topology}: {reason}: {known} {spent:.1f} s."
        if self._too_late:
            return f"{message} Set a longer limit, or compile a smaller model."
        last = [line for line in stderr.splitlines() if line.strip()][-_LAST_LINES:]
        return "\n".join([message, *(f"  {line}" for line in last)])


def _start(place: pathlib.Path, stderr: Any) -> subprocess.Popen:
    """Starts a worker, in a group of processes that can be ended as one."""
    # What can be imported here can be there: the modules that the config names.
    paths = [os.getcwd(), *(path for path in sys.path if path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
    return subprocess.Popen(
        [*WORKER, str(place / "request"), str(place / "result")],
        stdout=subprocess.PIPE,
        stderr=stderr,
        stdin=subprocess.PIPE,  # Its end tells the worker that we have ended.
        env=environment,
        text=True,
        start_new_session=True,
    )


def _kill(process: subprocess.Popen) -> None:
    """Ends the worker and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
