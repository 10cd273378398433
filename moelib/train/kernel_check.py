"""Kernels of a run: compared with their references at first use, and replaced if they fail.

At the first start of a config on a kind of device with some versions, the calls of kernels that its
step makes are compared, at the shapes of one device's micro-batch, by `moelib.kernels.check`. A
process of its own compares them, which ends where a kernel does not end. Verdicts are kept in the
user's cache, next to compiled programs, so that later starts compare nothing.

A TPU can be opened by one process only, so that the commands compare before they open devices.
Where these are open already, as in a notebook or in a job of several processes, a GPU is compared
with a part of its memory that is left; on a TPU the process itself compares, and ends if a kernel
hangs, which its next start replaces. Process 0 of a job decides for all.
"""

import contextlib
import faulthandler
import hashlib
import json
import logging
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from moelib.core import config_text
from moelib.core.errors import UserError
from moelib.kernels import backend as backends
from moelib.kernels.backend import Call
from moelib.kernels.check import FAILS, NO_MEMORY, backend_of, compare
from moelib.runtime import simulated
from moelib.runtime.compilation_cache import use_compilation_cache
from moelib.runtime.platforms import has_accelerator
from moelib.runtime.processes import on_process_0
from moelib.runtime.storage import user_cache_dir, write_json
from moelib.runtime.versions import library_versions
from moelib.train.watchers.watchdog import EXIT_CODE

PLATFORMS: Sequence[str] = ("gpu", "tpu")
COMMAND: Sequence[str] = (sys.executable, "-m", "moelib.train.kernel_check")

# Seconds for the trace of a step, and for one call with its compilation and its reference.
LIMIT_SECONDS = {"trace": 600.0, "call": 180.0}

# Fields of a config that determine the calls of its step.
_FIELDS = re.compile(
    r"(model|train_dtype|num_microbatches|mesh_\w+|auto_sharding|sharding_rules|pipeline_schedule"
    r"|kernel_backends|input\.(global_batch_size|seq_len))\b"
)
_REFERENCES = ("reference", "straight_through")  # Backends that nothing is compared with.
_SHARED = ".shared"  # Of verdicts in a part of the memory, where some calls are not compared.
_PLUGINS = ("libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin")

logger = logging.getLogger(__name__)


class Verdict(NamedTuple):
    """Outcome of the comparison of one call."""

    kernel: str
    call: str
    backend: str
    fault: str | None = None  # Such as "does not end within 180 s"; None if it is right.


def compare_before_devices(cfg: Any) -> None:
    """Compares a config's kernels in another process, if there is an accelerator and no verdict.

    Call it before this process opens a device.
    """
    path = _path(cfg, "*")
    if has_accelerator() and not any(path.parent.glob(path.name)):
        _in_processes(cfg)


def replaced_kernels(trainer: Any) -> dict[str, str]:
    """Returns {kernel: "xla"} for kernels to replace, after a warning for each.

    All processes must call it, with open devices. Compares the kernels if there are no verdicts for
    these devices.

    Raises:
        UserError: If plain XLA is wrong, for which there is no replacement.
    """
    device, mesh = jax.local_devices()[0], trainer.mesh()
    if device.platform not in PLATFORMS:
        return {}
    path = _path(trainer.config, _devices(mesh.size))

    def verdicts() -> list[Verdict]:
        for file in (path, path.with_suffix(_SHARED)):
            if (known := _read(file)) is not None:
                return known
        if device.platform == "tpu":
            return _in_this_process(trainer, path)
        return _in_processes(trainer.config, mesh.axis_sizes)

    found = [Verdict(*x) for x in on_process_0(verdicts)]
    return _replaced(found, device.device_kind, path.with_suffix(".*"))


def _replaced(verdicts: Iterable[Verdict], device_kind: str, kept: pathlib.Path) -> dict[str, str]:
    replaced: dict[str, str] = {}
    for kernel, call, backend, fault in verdicts:
        what, where = f"{kernel} by backend {backend!r} {fault}", f"on {device_kind}, in {call}"
        again = "To continue with this backend, set --skip_kernel_check."
        if fault == NO_MEMORY:
            logger.warning("%s, %s.", what, where)
        elif fault is not None and backend == "xla":
            raise UserError(f"{what}, {where}; it has no replacement. {again}")
        elif fault is not None and kernel not in replaced:
            replaced[kernel] = "xla"
            backends.warn_once(
                f"KERNEL REPLACED: {what}, {where}. The run takes plain XLA instead, which is "
                f"slow; to choose it without this warning, {backends.how_to_set(kernel, 'xla')}. "
                f"{again} To compare again, as after a start on a busy machine, remove {kept}."
            )
    return replaced


# -- Verdicts that are kept ------------------------------------------------------------------------


def _path(cfg: Any, devices: str) -> pathlib.Path:
    """Returns the file of the verdicts for a config on devices, these versions and backends."""
    lines = config_text.text_lines(cfg.debug_string())
    fields = sorted(item for item in lines.items() if _FIELDS.match(item[0]))
    folder = pathlib.Path(backends.__file__).parent
    sources = [path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))]
    parts = fields, library_versions(*_PLUGINS), os.environ.get(backends.ENVIRONMENT), sources
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return pathlib.Path(user_cache_dir("kernel_checks"), f"{digest[:24]}-{devices}.json")


def _devices(number: int) -> str:
    """Returns the part of a file's name for a number of devices of the kind of this process's."""
    return f"{number}-{re.sub(r'\W+', '-', jax.local_devices()[0].device_kind)}"


def _read(path: pathlib.Path) -> list[Verdict] | None:
    try:
        return [Verdict(*x) for x in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, TypeError, ValueError):  # Absent or incomplete: compared again.
        return None


def _keep(path: pathlib.Path, verdicts: Sequence[Verdict]) -> None:
    """Writes verdicts to a file; a folder that cannot be written is a warning."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(path, verdicts)
    except OSError as error:
        logger.warning("%s: verdicts on kernels are not kept (%s).", path, error.strerror)


# -- Comparisons -----------------------------------------------------------------------------------


def calls_of(cfg: Any, devices: Any) -> list[Call]:
    """Returns the calls of a config's step on devices, which compute nothing."""
    cfg = cfg.clone(evalers={}, watchers={}, checkpointer=None, init_from=None, rewind_to=None)
    cfg.set(phases={}, phase=None)
    cfg.kernel_backends = dict.fromkeys(backends.BACKENDS, "xla")  # Traced for any devices.
    with backends.recorded_calls() as calls:
        cfg.instantiate(parent=None, devices=devices).trace_train_step()
    return calls


def _begun(calls: Iterable[Call], known: Container[str]) -> Iterator[tuple[Call, Verdict]]:
    """Yields the calls to compare, with the verdicts if they do not end.

    A call that the chosen backend cannot compute is an error where the run traces it.
    """
    fault = f"does not end within {LIMIT_SECONDS['call']:g} s"
    for call in calls:
        with contextlib.suppress(UserError):
            backend = backend_of(call)
            if backend not in _REFERENCES and str(call) not in known:
                yield call, Verdict(call.kernel, str(call), backend, fault)


def _in_this_process(trainer: Any, path: pathlib.Path) -> list[Verdict]:
    """Returns and keeps the verdicts on a trainer's calls; a call that hangs ends the process.

    Its next start goes on from there, with the verdicts that were kept next to the file.
    """
    with backends.recorded_calls() as calls:
        trainer.trace_train_step()
    partial = path.with_suffix(".partial")
    verdicts = _read(partial) or []

    def end(begun: Verdict) -> None:
        _keep(partial, [*verdicts, begun])
        os.write(2, f"{begun.call} {begun.fault}; the next start replaces it.\n".encode())
        faulthandler.dump_traceback(2)  # Of all threads.
        os._exit(EXIT_CODE)

    with backends.kernel_backends(trainer.config.kernel_backends):
        for call, begun in _begun(calls, [verdict.call for verdict in verdicts]):
            timer = threading.Timer(LIMIT_SECONDS["call"], end, [begun])
            timer.start()
            try:
                verdicts.append(begun._replace(fault=compare(call)))
            finally:
                timer.cancel()
    _keep(path, verdicts)
    return verdicts


def _in_processes(cfg: Any, mesh: Sequence[int] | None = None) -> list[Verdict]:
    """Returns and keeps the verdicts of processes that compare; a fault ends one, the next goes on.

    Args:
        cfg: Config of the trainer.
        mesh: Sizes of the mesh, if the devices are open already. The processes then trace the step
            for simulated ones, and compare on the first GPU, in 5% of its memory.
    """
    logger.info("Comparing kernels with their references, once per config and kind of device.")
    verdicts: dict[str, Verdict] = {}  # By call.
    while True:
        request = {"config": config_text.to_text(cfg), "mesh": mesh, "known": list(verdicts)}
        text, environment = json.dumps(request).encode(), _environment(is_shared=mesh is not None)
        done = subprocess.run(
            COMMAND, input=text, env=environment, capture_output=True, check=False
        )
        devices, *lines = [json.loads(line) for line in done.stdout.splitlines()] or [None]
        found = [Verdict(*line) for line in lines]
        verdicts |= {verdict.call: verdict for verdict in found}
        if done.returncode == 0:
            path = _path(cfg, devices)
            _keep(path if mesh is None else path.with_suffix(_SHARED), list(verdicts.values()))
            return list(verdicts.values())
        if not found:
            log = done.stderr[-2000:].decode(errors="replace")
            logger.warning("Kernels could not be compared (status %d):\n%s", done.returncode, log)
            return list(verdicts.values())  # Not kept: the next start goes on.
        has_begun = len(found) % 2 == 1  # Calls that have ended have two verdicts.
        if has_begun and done.returncode != -signal.SIGALRM:
            fault = f"its process ended with status {done.returncode}"
            verdicts[found[-1].call] = found[-1]._replace(fault=fault)


def _environment(*, is_shared: bool) -> dict[str, str]:
    """Returns the environment of a process that compares, next to this one if that is open."""
    chosen = jax.config.jax_platforms or ""  # Also those of a flag.
    if chosen and "cpu" not in chosen:
        chosen += ",cpu"  # Of the simulated devices.
    environment = {
        **os.environ,
        "JAX_PLATFORMS": chosen,
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
    }
    shared = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "",  # The name before; JAX refuses both.
        "XLA_CLIENT_MEM_FRACTION": "0.05",  # This process has `platforms.GPU_MEMORY_SHARE`.
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
    }
    return environment | shared if is_shared else environment


def main() -> None:
    """Compares the calls of the config on stdin, and prints JSON.

    The first line names the devices, and each other one is a verdict: that a call does not end,
    before it is compared, and what was found.
    """
    # The signal ends the process, also where it runs no Python.
    signal.setitimer(signal.ITIMER_REAL, LIMIT_SECONDS["trace"])
    request = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What libraries print is no verdict.
    cfg = config_text.parse(request["config"], trusted=True)  # The parent's own.
    if mesh := request["mesh"]:
        cfg.mesh_shape = tuple(mesh)
        simulated.simulate_devices(math.prod(mesh))
    use_compilation_cache()
    devices = jax.devices("cpu" if mesh else None)
    calls = calls_of(cfg, devices)
    print(json.dumps(_devices(len(devices))), file=out, flush=True)
    with backends.kernel_backends(cfg.kernel_backends):
        for call, begun in _begun(calls, request["known"]):
            print(json.dumps(begun), file=out, flush=True)
            signal.setitimer(signal.ITIMER_REAL, LIMIT_SECONDS["call"])
            fault = compare(call)
            print(json.dumps(begun._replace(fault=fault)), file=out, flush=True)
            if (fault or "").startswith(FAILS):
                sys.exit(1)  # A GPU may have an error that stays until its process ends.


if __name__ == "__main__":
    main()
