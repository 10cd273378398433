"""Kernels of a run: compared with their definitions at first use, and replaced if they fail.

At the first start of a config on a kind of device with some versions, the calls of kernels that its
step makes are compared, at the shapes of one device's micro-batch, by `moelib.kernels.check`. A
process of its own compares them, which is ended where a kernel does not end. Verdicts are kept in
the user's cache, next to compiled programs, so that later starts compare nothing.

A TPU can be opened by one process only, so that the commands compare before they open devices.
Where these are open already, as in a notebook or in a job of several processes, a GPU is compared
with a part of its memory that is left; on a TPU the process itself compares, and ends if a kernel
hangs, which its next start replaces. Process 0 of a job decides for all.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import math
import os
import pathlib
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

import jax

from moelib.core import config_text
from moelib.core.errors import UserError
from moelib.kernels import backend
from moelib.kernels.backend import (
    BACKENDS,
    ENVIRONMENT,
    Call,
    how_to_set,
    kernel_backends,
    recorded_calls,
    warn_once,
)
from moelib.kernels.check import backend_of, compare
from moelib.parallel.mesh import HybridMeshShape
from moelib.runtime import platforms
from moelib.runtime.compilation_cache import use_compilation_cache
from moelib.runtime.processes import on_process_0
from moelib.runtime.storage import read_json, user_cache_dir, write_json
from moelib.runtime.versions import library_versions
from moelib.train.watcher import Activity
from moelib.train.watchers.watchdog import Watchdog

PLATFORMS: Sequence[str] = ("gpu", "tpu")
COMMAND: Sequence[str] = (sys.executable, "-m", "moelib.train.kernel_check")

# Seconds for the trace of a step, and for one call with its compilation and its definition.
LIMIT_SECONDS = {"trace": 600.0, "call": 180.0}
# Share of a GPU's memory for a comparison next to a process that has taken
# `platforms.GPU_MEMORY_SHARE`.
_SHARED_MEMORY = 0.05

# Fields of a config that determine the calls of its step.
_FIELDS = re.compile(
    r"(model|train_dtype|num_microbatches|mesh_\w+|auto_sharding|sharding_rules|pipeline_schedule"
    r"|kernel_backends|input\.(global_batch_size|seq_len))\b"
)
_FAILS, _DOES_NOT_END = "fails", "does not end within {:g} s"  # Faults.
_DEFINITIONS = ("reference", "straight_through")  # Backends that others are compared with.
_PARTIAL = "partial"  # Before the name of devices for which calls are left to compare.
_PLUGINS = ("libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin")

_COSTS = {
    "flash_attention": "moves about 40 times as many bytes",
    "gmm": "loops over blocks of rows and writes the products of gate and up to memory",
    "quantized_matmul": "multiplies in the dtype of activations, at half the rate of 8 bits",
}

logger = logging.getLogger(__name__)


class Verdict(NamedTuple):
    """Outcome of the comparison of one call."""

    kernel: str
    call: str
    backend: str
    fault: str | None = None  # Such as "does not end within 180 s"; None if it is right.
    shortened: str | None = None  # Shape that was compared instead.


Known = dict[str, list[Verdict]]  # By number and kind of devices.


def compare_before_devices(cfg: Any) -> None:
    """Compares a config's kernels in another process, if there is an accelerator and no verdict.

    Call it before this process opens a device.
    """
    if not _has_accelerator():
        return
    path = _path(cfg)
    if all(name.startswith(_PARTIAL) for name in _read(path)):
        _keep(path, _in_processes(cfg, {}))


def replaced_kernels(trainer: Any) -> dict[str, str]:
    """Returns {kernel: "xla"} for kernels to replace, after a warning for each.

    All processes must call it, with open devices. Compares the kernels if there are no verdicts for
    these devices.

    Raises:
        UserError: If plain XLA is wrong, for which there is no replacement.
    """
    device, cfg = jax.local_devices()[0], trainer.config
    if device.platform not in PLATFORMS:
        return {}
    name, path = _name(device.device_kind, trainer.mesh().size), _path(cfg)

    def verdicts() -> list[Verdict]:
        known = _read(path)
        if name in known:
            return known[name]
        if device.platform == "tpu":
            found = {name: _in_this_process(trainer, name, path)}
        else:
            found = _in_processes(cfg, _shared_gpu(), trainer.mesh().size)
        _keep(path, found)
        return found.get(name, [])

    return _replaced([Verdict(*x) for x in on_process_0(verdicts)], device.device_kind)


def _replaced(verdicts: Iterable[Verdict], device_kind: str) -> dict[str, str]:
    replaced: dict[str, str] = {}
    for verdict in verdicts:
        if verdict.shortened is not None:
            logger.warning(
                "%s: the check compared %s, for lack of memory.", verdict.call, verdict.shortened
            )
        if verdict.fault is None:
            continue
        what = f"{verdict.kernel} by backend {verdict.backend!r} {verdict.fault}"
        where = f"on {device_kind}, in {verdict.call}"
        again = "To continue with this backend, set --skip_kernel_check."
        if verdict.backend == "xla":
            raise UserError(f"{what}, {where}; it has no replacement. {again}")
        if verdict.kernel not in replaced:
            replaced[verdict.kernel] = "xla"
            warn_once(
                f"KERNEL REPLACED: {what}, {where}. The run takes plain XLA instead, which "
                f"{_COSTS[verdict.kernel]}; to choose it without this warning, "
                f"{how_to_set(verdict.kernel, 'xla')}. {again}"
            )
    return replaced


# -- Verdicts that are kept ------------------------------------------------------------------------


def _path(cfg: Any) -> str:
    """Returns the file of the verdicts for a config, these versions and these backends."""
    lines = config_text.text_lines(cfg.debug_string())
    fields = sorted(item for item in lines.items() if _FIELDS.match(item[0]))
    folder = pathlib.Path(backend.__file__).parent
    sources = [path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))]
    parts = fields, sorted(_versions().items()), os.environ.get(ENVIRONMENT), sources
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return os.path.join(user_cache_dir("kernel_checks"), f"{digest[:24]}.json")


def _versions() -> dict[str, str]:
    found = library_versions()
    for name in _PLUGINS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _read(path: str) -> Known:
    try:
        devices = read_json(path).get("devices", {})
        return {name: [Verdict(*x) for x in found] for name, found in devices.items()}
    except (OSError, TypeError, ValueError, AttributeError):  # Incomplete: compared again.
        return {}


def _keep(path: str, found: Known) -> None:
    """Adds verdicts to the file; a folder that cannot be written is a warning."""
    if not found:
        return
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        write_json(path, {"versions": _versions(), "devices": {**_read(path), **found}})
    except OSError as error:
        logger.warning("%s: verdicts on kernels are not kept (%s).", path, error.strerror)


def _name(device_kind: str, num_devices: int) -> str:
    return f"{num_devices} x {device_kind}"


def _has_accelerator() -> bool:
    """Returns whether JAX would open an accelerator, as far as files and settings show."""
    chosen = jax.config.jax_platforms or ""
    if chosen.split(",")[0] == "cpu":
        return "cpu" in PLATFORMS
    return platforms.has_tpu() or platforms.has_gpu()


# -- In this process -------------------------------------------------------------------------------


def calls_of(cfg: Any, devices: Any) -> list[Call]:
    """Returns the calls of a config's step on devices, which compute nothing."""
    # No backend of the config's can refuse to be traced for other devices.
    mesh_shape = cfg.mesh_shape
    if isinstance(mesh_shape, HybridMeshShape):
        mesh_shape = [a * b for a, b in zip(*mesh_shape, strict=True)]
    traced = cfg.clone(
        mesh_shape=mesh_shape,
        kernel_backends=dict.fromkeys(BACKENDS, "xla"),
        evalers={},
        watchers={},
        checkpointer=None,
        init_from=None,
    )
    with recorded_calls() as calls:
        traced.instantiate(parent=None, devices=devices).trace_train_step()
    return calls


def _begun(calls: Iterable[Call], known: Iterable[str]) -> Iterator[tuple[Call, Verdict]]:
    """Yields the calls to compare, with verdicts that have no fault yet.

    A call that the chosen backend cannot compute is an error where the run traces it.
    """
    for call in calls:
        with contextlib.suppress(UserError):
            backend = backend_of(call)
            if backend not in _DEFINITIONS and str(call) not in known:
                yield call, Verdict(call.kernel, str(call), backend)


def _compared(call: Call, begun: Verdict) -> Verdict:
    """Returns the verdict on a call; an exception is one."""
    try:
        found = compare(call)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        if "RESOURCE_EXHAUSTED" in reason:
            return begun._replace(shortened="nothing")
        return begun._replace(fault=f"{_FAILS} ({type(error).__name__}: {reason:.300})")
    fault = None if found.difference is None else f"is wrong: {found.difference}"
    return begun._replace(fault=fault, shortened=found.shortened)


def _in_this_process(trainer: Any, name: str, path: str) -> list[Verdict]:
    """Returns the verdicts on a trainer's calls; a call that hangs ends the process.

    Its next start goes on from there.
    """
    with recorded_calls() as calls:
        trainer.trace_train_step()
    partial, limit = f"{_PARTIAL} {name}", LIMIT_SECONDS["call"]
    verdicts = list(_read(path).get(partial, ()))
    limits = {"timeout_seconds": limit + 1, "crash_timeout_seconds": limit + 1}
    watchdog = Watchdog.default_config().set(**limits)
    with kernel_backends(trainer.config.kernel_backends):
        for call, begun in _begun(calls, [verdict.call for verdict in verdicts]):
            hangs = begun._replace(fault=_DOES_NOT_END.format(limit))
            timer = threading.Timer(limit, _keep, (path, {partial: [*verdicts, hangs]}))
            timer.start()
            activity = Activity(0, time.monotonic(), f", while {call} is compared")
            with watchdog.instantiate().watch(activity):
                verdicts.append(_compared(call, begun))
            timer.cancel()
    return verdicts


# -- In other processes ----------------------------------------------------------------------------


def _shared_gpu() -> dict[str, str]:
    """Returns the environment of a process that compares on the first GPU, next to this one."""
    others = {name: x for name, x in os.environ.items() if "CLIENT_MEM_FRACTION" not in name}
    return {
        **others,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_CLIENT_MEM_FRACTION": str(_SHARED_MEMORY),
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
    }


def _in_processes(cfg: Any, environment: Mapping[str, str], num_devices: int = 0) -> Known:
    """Returns the verdicts of processes that compare; a fault ends one, and another one goes on."""
    logger.info("Comparing kernels with their references, once per config and kind of device.")
    verdicts: list[Verdict] = []
    with tempfile.TemporaryFile() as log:
        while True:
            request = {
                "config": config_text.to_text(cfg),
                "platforms": jax.config.jax_platforms,
                "num_devices": num_devices,
                "known": [verdict.call for verdict in verdicts],
            }
            child = _Child(request, environment, log)
            verdicts += child.verdicts
            if child.is_done and child.device is not None:
                return {child.device: verdicts}
            if not child.verdicts:
                log.seek(max(0, log.tell() - 2000))
                logger.warning(
                    "Kernels could not be compared (%s):\n%s",
                    child.problem,
                    log.read().decode(errors="replace"),
                )
                return {}


class _Child:
    """A process that compares calls until one fails, and what it printed."""

    def __init__(
        self, request: Mapping[str, Any], environment: Mapping[str, str], log: IO[bytes]
    ) -> None:
        self.verdicts: list[Verdict] = []
        self.device: str | None = None  # Its kind and number, once the step is traced.
        self.is_done = False
        self.problem = ""
        path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
        process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**(environment or os.environ), "PYTHONPATH": path},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout
        lines: queue.Queue[bytes] = queue.Queue()

        def put() -> None:
            for line in stdout:
                lines.put(line)
            lines.put(b"")

        reader = threading.Thread(target=put, name="kernel check", daemon=True)
        reader.start()
        try:
            with contextlib.suppress(BrokenPipeError), stdin:
                stdin.write(json.dumps(request).encode())
            self._read(process, lines)
        finally:
            process.kill()
            process.wait()
            reader.join()
            stdout.close()

    def _read(self, process: subprocess.Popen[bytes], lines: queue.Queue[bytes]) -> None:
        """Takes lines until the process ends, or prints none for too long."""
        begun: Verdict | None = None
        while not self.is_done:
            limit = LIMIT_SECONDS["call" if self.device else "trace"]
            try:
                line = lines.get(timeout=limit)
                problem = f"its process ended with status {process.wait()}" if not line else None
            except queue.Empty:
                line, problem = b"", _DOES_NOT_END.format(limit)
            if problem is not None:
                self.problem = problem
                if begun is not None:
                    self.verdicts.append(begun._replace(fault=problem))
                return
            event = json.loads(line)
            self.device = event.get("device", self.device)
            self.is_done = event.get("done", False)
            if "begun" in event:
                begun = Verdict(*event["begun"])
            if "verdict" in event:
                self.verdicts.append(Verdict(*event["verdict"]))
                begun = None


def main() -> None:
    """Compares the calls of the config on stdin, and prints a line of JSON for each event."""
    request = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What libraries print is no event.

    def say(**event: Any) -> None:
        print(json.dumps(event), file=out, flush=True)

    cfg = config_text.parse(request["config"], trusted=True)  # The parent's own.
    chosen = request["platforms"]
    if chosen and "cpu" not in chosen.split(","):
        jax.config.update("jax_platforms", f"{chosen},cpu")
    elif chosen:
        jax.config.update("jax_platforms", chosen)
    use_compilation_cache()
    number = request["num_devices"] or _num_devices(cfg)
    jax.config.update("jax_num_cpu_devices", number)
    calls = calls_of(cfg, jax.devices("cpu")[:number])
    say(device=_name(jax.local_devices()[0].device_kind, number))
    with kernel_backends(cfg.kernel_backends):
        for call, begun in _begun(calls, request["known"]):
            say(begun=begun)
            verdict = _compared(call, begun)
            say(verdict=verdict)
            if (verdict.fault or "").startswith(_FAILS):
                return  # A GPU may have an error that stays until its process ends.
    say(done=True)


def _num_devices(cfg: Any) -> int:
    """Returns the number of devices of a config's mesh; another process counts if it has a -1."""
    sizes = jax.tree.leaves(tuple(cfg.mesh_shape))
    if -1 not in sizes:
        return math.prod(sizes)
    count = "import jax; print(jax.local_device_count())"
    done = subprocess.run([sys.executable, "-c", count], capture_output=True, check=True, text=True)
    return int(done.stdout)


if __name__ == "__main__":
    main()
