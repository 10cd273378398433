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
import importlib.metadata
import json
import logging
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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
from moelib.runtime import platforms
from moelib.runtime.compilation_cache import use_compilation_cache
from moelib.runtime.processes import on_process_0
from moelib.runtime.storage import read_json, user_cache_dir, write_json
from moelib.runtime.versions import library_versions
from moelib.train.watchers.watchdog import EXIT_CODE

PLATFORMS: Sequence[str] = ("gpu", "tpu")
COMMAND: Sequence[str] = (sys.executable, "-m", "moelib.train.kernel_check")

# Seconds for the trace of a step, and for one call with its compilation and its reference.
LIMIT_SECONDS = {"trace": 600.0, "call": 180.0}
# Share of a GPU's memory for a comparison next to a process that has taken
# `platforms.GPU_MEMORY_SHARE`.
_SHARED_MEMORY = 0.05

# Fields of a config that determine the calls of its step.
_FIELDS = re.compile(
    r"(model|train_dtype|num_microbatches|mesh_\w+|auto_sharding|sharding_rules|pipeline_schedule"
    r"|kernel_backends|input\.(global_batch_size|seq_len))\b"
)
_FAILS, _DOES_NOT_END = "fails", "does not end"  # Faults begin so.
_NO_MEMORY = "is not compared, for lack of memory"  # No fault.
_REFERENCES = ("reference", "straight_through")  # Backends that nothing is compared with.
_PLUGINS = ("libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin")

logger = logging.getLogger(__name__)


class Verdict(NamedTuple):
    """Outcome of the comparison of one call."""

    kernel: str
    call: str
    backend: str
    fault: str | None = None  # Such as "does not end within 180 s"; None if it is right.


Known = dict[str, list[Verdict]]  # By number and kind of devices.


def compare_before_devices(cfg: Any) -> None:
    """Compares a config's kernels in another process, if there is an accelerator and no verdict.

    Call it before this process opens a device.
    """
    if not _has_accelerator():
        return
    path = _path(cfg)
    if not _read(path):
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
    name, path = _name(trainer.mesh().size), _path(cfg)

    def verdicts() -> list[Verdict]:
        known = _read(path)
        if name in known:
            return known[name]
        if device.platform == "tpu":
            found = {name: _in_this_process(trainer, name, f"{path}.partial")}
        else:
            simulated = cfg.clone(mesh_shape=trainer.mesh().axis_sizes)
            found = _in_processes(simulated, _next_to_this_process(trainer.mesh().size))
        _keep(path, found)
        return found.get(name, [])

    return _replaced([Verdict(*x) for x in on_process_0(verdicts)], device.device_kind)


def _replaced(verdicts: Iterable[Verdict], device_kind: str) -> dict[str, str]:
    replaced: dict[str, str] = {}
    for verdict in verdicts:
        what = f"{verdict.kernel} by backend {verdict.backend!r} {verdict.fault}"
        where = f"on {device_kind}, in {verdict.call}"
        again = "To continue with this backend, set --skip_kernel_check."
        if verdict.fault == _NO_MEMORY:
            logger.warning("%s, %s.", what, where)
        elif verdict.fault is not None and verdict.backend == "xla":
            raise UserError(f"{what}, {where}; it has no replacement. {again}")
        elif verdict.fault is not None and verdict.kernel not in replaced:
            replaced[verdict.kernel] = "xla"
            warn_once(
                f"KERNEL REPLACED: {what}, {where}. The run takes plain XLA instead, which is "
                f"slow; to choose it without this warning, {how_to_set(verdict.kernel, 'xla')}. "
                f"{again}"
            )
    return replaced


# -- Verdicts that are kept ------------------------------------------------------------------------


def _path(cfg: Any) -> str:
    """Returns the file of the verdicts for a config, these versions and these backends."""
    lines = config_text.text_lines(cfg.debug_string())
    fields = sorted(item for item in lines.items() if _FIELDS.match(item[0]))
    versions = library_versions()
    for plugin in _PLUGINS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[plugin] = importlib.metadata.version(plugin)
    folder = pathlib.Path(backend.__file__).parent
    sources = [path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))]
    parts = fields, versions, os.environ.get(ENVIRONMENT), sources
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return os.path.join(user_cache_dir("kernel_checks"), f"{digest[:24]}.json")


def _read(path: str) -> Known:
    try:
        return {name: [Verdict(*x) for x in found] for name, found in read_json(path).items()}
    except (OSError, TypeError, ValueError, AttributeError):  # Incomplete: compared again.
        return {}


def _keep(path: str, found: Known) -> None:
    """Adds verdicts to the file; a folder that cannot be written is a warning."""
    if not found:
        return
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        write_json(path, {**_read(path), **found})
    except OSError as error:
        logger.warning("%s: verdicts on kernels are not kept (%s).", path, error.strerror)


def _name(num_devices: int) -> str:
    return f"{num_devices} x {jax.local_devices()[0].device_kind}"


def _has_accelerator() -> bool:
    """Returns whether JAX would open an accelerator, as far as files and settings show."""
    chosen = jax.config.jax_platforms or ""
    if chosen.split(",")[0] == "cpu":
        return "cpu" in PLATFORMS
    return platforms.has_tpu() or platforms.has_gpu()


# -- In this process -------------------------------------------------------------------------------


def calls_of(cfg: Any, devices: Any) -> list[Call]:
    """Returns the calls of a config's step on devices, which compute nothing."""
    traced = cfg.clone(
        kernel_backends=dict.fromkeys(BACKENDS, "xla"),  # Which are traced for any devices.
        evalers={},
        watchers={},
        checkpointer=None,
        init_from=None,
    )
    with recorded_calls() as calls:
        traced.instantiate(parent=None, devices=devices).trace_train_step()
    return calls


def _begun(calls: Iterable[Call], known: Iterable[str]) -> Iterator[tuple[Call, Verdict]]:
    """Yields the calls to compare, with the verdicts if they do not end.

    A call that the chosen backend cannot compute is an error where the run traces it.
    """
    fault = f"{_DOES_NOT_END} within {LIMIT_SECONDS['call']:g} s"
    for call in calls:
        with contextlib.suppress(UserError):
            backend = backend_of(call)
            if backend not in _REFERENCES and str(call) not in known:
                yield call, Verdict(call.kernel, str(call), backend, fault)


def _compared(call: Call, begun: Verdict) -> Verdict:
    """Returns the verdict on a call; an exception is one."""
    try:
        difference = compare(call)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        if "RESOURCE_EXHAUSTED" in reason and "vmem" not in reason:  # Of the kernel's own.
            return begun._replace(fault=_NO_MEMORY)
        return begun._replace(fault=f"{_FAILS} ({type(error).__name__}: {reason:.300})")
    return begun._replace(fault=difference and f"is wrong: {difference}")


def _in_this_process(trainer: Any, name: str, path: str) -> list[Verdict]:
    """Returns the verdicts on a trainer's calls; a call that hangs ends the process.

    Its next start goes on from there, with the verdicts for these devices in the file.
    """
    with recorded_calls() as calls:
        trainer.trace_train_step()
    verdicts = list(_read(path).get(name, ()))
    with kernel_backends(trainer.config.kernel_backends):
        for call, begun in _begun(calls, [verdict.call for verdict in verdicts]):
            kept = path, {name: [*verdicts, begun]}
            timer = threading.Timer(LIMIT_SECONDS["call"], _end, kept)
            timer.start()
            try:
                verdicts.append(_compared(call, begun))
            finally:
                timer.cancel()
    return verdicts


def _end(path: str, found: Known) -> None:
    """Ends the process, after verdicts are kept and the stacks of all threads printed."""
    _keep(path, found)
    ((*_, last),) = found.values()
    os.write(2, f"{last.call} {last.fault}; the next start replaces it.\n".encode())
    faulthandler.dump_traceback(2)
    os._exit(EXIT_CODE)


# -- In other processes ----------------------------------------------------------------------------


def _next_to_this_process(num_devices: int) -> dict[str, str]:
    """Returns the environment of a process that compares on the first GPU, next to this one.

    Its step is traced for as many simulated devices.
    """
    chosen = jax.config.jax_platforms or ""
    return {
        "JAX_PLATFORMS": chosen if "cpu" in chosen.split(",") else chosen and f"{chosen},cpu",
        "JAX_NUM_CPU_DEVICES": str(num_devices),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_CLIENT_MEM_FRACTION": str(_SHARED_MEMORY),
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
    }


def _in_processes(cfg: Any, settings: Mapping[str, str]) -> Known:
    """Returns the verdicts of processes that compare; a fault ends one, and another one goes on.

    Args:
        cfg: Config of the trainer.
        settings: Environment variables, if the devices are open already; see
            `_next_to_this_process`.
    """
    logger.info("Comparing kernels with their references, once per config and kind of device.")
    others = {name: x for name, x in os.environ.items() if "CLIENT_MEM_FRACTION" not in name}
    environment = {
        **(others if settings else os.environ),
        "JAX_PLATFORMS": jax.config.jax_platforms or "",  # Also those of a flag.
        **settings,
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
    }
    request = {"config": config_text.to_text(cfg), "is_simulated": bool(settings)}
    verdicts: dict[str, Verdict] = {}  # By call.
    while True:
        done = subprocess.run(
            COMMAND,
            input=json.dumps({**request, "known": list(verdicts)}).encode(),
            env=environment,
            capture_output=True,
            check=False,
        )
        device, *lines = [json.loads(line) for line in done.stdout.splitlines()] or [None]
        found = [Verdict(*line) for line in lines]
        verdicts |= {verdict.call: verdict for verdict in found}
        if done.returncode == 0:
            return {device: list(verdicts.values())}
        if not found:
            log = done.stderr[-2000:].decode(errors="replace")
            logger.warning("Kernels could not be compared (status %d):\n%s", done.returncode, log)
            return {}
        last = found[-1]
        is_begun = (last.fault or "").startswith(_DOES_NOT_END)
        if is_begun and done.returncode != -signal.SIGALRM:
            fault = f"its process ended with status {done.returncode}"
            verdicts[last.call] = last._replace(fault=fault)


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

    def say(value: Any) -> None:
        print(json.dumps(value), file=out, flush=True)

    cfg = config_text.parse(request["config"], trusted=True)  # The parent's own.
    use_compilation_cache()
    devices = jax.devices("cpu") if request["is_simulated"] else jax.devices()
    calls = calls_of(cfg, devices)
    say(_name(len(devices)))
    with kernel_backends(cfg.kernel_backends):
        for call, begun in _begun(calls, request["known"]):
            say(begun)
            signal.setitimer(signal.ITIMER_REAL, LIMIT_SECONDS["call"])
            verdict = _compared(call, begun)
            say(verdict)
            if (verdict.fault or "").startswith(_FAILS):
                sys.exit(1)  # A GPU may have an error that stays until its process ends.


if __name__ == "__main__":
    main()
