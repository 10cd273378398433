"""The processes of a job, connected: JAX then uses the devices of all of them as one machine."""

import logging
import os
import re
import socket
import time
from collections.abc import Collection, Mapping

import jax
import numpy as np

from moelib.core.errors import UsageError, UserError
from moelib.runtime import platforms
from moelib.runtime.cluster import Cluster, find_cluster, gpus_of_process
from moelib.runtime.lost_process import ended_with_others
from moelib.runtime.processes import gather_json
from moelib.runtime.versions import library_versions

logger = logging.getLogger(__name__)

_CLOCK_SKEW_SECONDS = 5.0  # Between hosts; more than a process may be late.


def initialize_distributed(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    start_timeout_seconds: int = 300,
    heartbeat_timeout_seconds: int = 10,
) -> Cluster | None:
    """Connects the processes of this process's job, and returns the job; None for one process.

    Without arguments, the job is found in the environment (`moelib.runtime.cluster`). Processes
    wait for each other, and end when one of them is lost (`moelib.runtime.lost_process`). Call it
    before anything computes.

    Args:
        coordinator: Address of process 0, as host:port; alone, it replaces that of the environment.
        num_processes: Number of processes of the job; 1 also replaces what the environment has.
        process_id: Index of this process, from 0.
        start_timeout_seconds: Seconds that a process waits for the others to start.
        heartbeat_timeout_seconds: Seconds without a heartbeat of a process before the others end.

    Raises:
        UsageError: If only some arguments are set, or are wrong, or the environment is incomplete.
        UserError: If another process does not start, or has other versions.
    """
    job = _job(coordinator, num_processes, process_id)
    if job is None or job.coordinator is None:
        return None
    address = job.coordinator
    job.check()
    bind_address = _bind_address(job, address)
    with ended_with_others(
        address,
        job.num_processes,
        job.process_id,
        start_timeout_seconds,
        bind_address=bind_address,
        setting=job.settings[0],
        description=", ".join(f"{name} {version}" for name, version in library_versions().items()),
    ):
        jax.distributed.initialize(
            address,
            job.num_processes,
            job.process_id,
            local_device_ids=gpus_of_process(job.local_size, job.local_id),
            heartbeat_timeout_seconds=heartbeat_timeout_seconds,
            coordinator_bind_address=bind_address,
            cluster_detection_method="deactivate",
        )
    return job


def check_job() -> None:
    """Raises UserError if the processes of this job are not connected, or have unequal devices.

    Logs a warning if the clocks of their hosts differ, by which logs of hosts are compared.
    """
    setting = jax.config.jax_platforms
    platforms.check_devices("JAX's platform" if setting is None else f"JAX_PLATFORMS={setting}")
    if jax.process_count() == 1:
        return
    if not jax.distributed.is_initialized():  # Processes of a TPU slice compute without it.
        raise UserError(
            f"{jax.process_count()} processes are not connected, and SIGTERM would lose steps; "
            "call moelib.runtime.distributed.initialize_distributed() before anything computes."
        )
    found = gather_json({"host": socket.gethostname(), "devices": jax.local_device_count()})
    first = found[0]
    for index, each in enumerate(found):
        if each["devices"] != first["devices"]:
            raise UserError(
                f"process {index} on {each['host']} has {each['devices']} devices, process 0 on "
                f"{first['host']} {first['devices']}; give all processes of a job the same number."
            )
    times = gather_json(time.time())  # All have left the exchange above at about the same time.
    for each, seconds in zip(found, times, strict=True):
        if abs(seconds - times[0]) > _CLOCK_SKEW_SECONDS:
            logger.warning(
                "the clock of %s is %+.0f s from that of %s; set both by NTP, or times in logs and "
                "metrics do not compare.",
                *(each["host"], seconds - times[0], first["host"]),
            )


def describe_processes(mesh: jax.sharding.Mesh) -> list[str]:
    """Returns a line per process, with its host, devices and mesh coordinates; none for one."""
    if jax.process_count() == 1:
        return []
    devices = set(jax.local_devices())
    own = (
        f"{socket.gethostname()}, {len(devices)} x {jax.local_devices()[0].device_kind}, "
        f"mesh {coordinates(mesh, devices)}, jax {jax.__version__}"
    )
    return [f"Process {i} of {jax.process_count()}: {x}" for i, x in enumerate(gather_json(own))]


def coordinates(mesh: jax.sharding.Mesh, devices: Collection[jax.Device]) -> str:
    """Returns the coordinates of devices along the axes of a mesh, such as expert=1,fsdp=2-3."""
    where = np.argwhere(np.vectorize(devices.__contains__)(mesh.devices))
    ranges = zip(mesh.axis_names, where.min(0), where.max(0), mesh.devices.shape, strict=True)
    return ",".join(
        f"{axis}={low}" if low == high else f"{axis}={low}-{high}"
        for axis, low, high, size in ranges
        if size > 1
    )


def _job(
    coordinator: str | None, num_processes: int | None, process_id: int | None
) -> Cluster | None:
    if num_processes == 1 and process_id in (None, 0):
        return None
    if num_processes is not None and process_id is not None and coordinator is not None:
        return Cluster("flags", coordinator, num_processes, process_id)
    if num_processes is not None or process_id is not None:
        raise UsageError(
            "--distributed_coordinator, --num_processes and --process_id require each other; set "
            "all three."
        )
    found = find_cluster(tpu=jax.config.jax_platforms != "cpu")
    if found is None and coordinator is not None:
        raise UsageError(
            f"--distributed_coordinator={coordinator}: no launcher of several processes is found; "
            "set --num_processes and --process_id, too."
        )
    if found is None:
        _warn_outside_srun(os.environ)
        return None
    if coordinator is None and found.coordinator is None:
        raise UsageError(
            f"{found.launcher} does not tell where process 0 runs; set "
            "--distributed_coordinator=host:port, with a free port of its host."
        )
    if coordinator is None:
        return found
    settings = Cluster._field_defaults["settings"][:1] + found.settings[1:]
    return found._replace(coordinator=coordinator, settings=settings)


def _warn_outside_srun(environ: Mapping[str, str]) -> None:
    number = environ.get("SLURM_NTASKS", "1")
    if number != "1" and "JAX_NUM_PROCESSES" not in environ:
        logger.warning(
            "SLURM_NTASKS=%s, but this is one process outside of srun; start it by srun to use "
            "all tasks of the job.",
            number,
        )


def _bind_address(job: Cluster, address: str) -> str:
    """Returns the address at which process 0 listens: that of the coordinator alone, if possible.

    Systems such as Debian resolve a host's own name to an address that no other host reaches.
    """
    host, _, port = address.rpartition(":")
    try:
        is_loopback = socket.gethostbyname(host).startswith("127.") and host != "localhost"
    except OSError:
        return address
    is_name = not re.fullmatch(r"[\d.]+", host)
    spans_hosts = job.local_size < job.num_processes
    return f"0.0.0.0:{port}" if is_loopback and is_name and spans_hosts else address
