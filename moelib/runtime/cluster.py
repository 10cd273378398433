"""The job that a process belongs to, found in the environment of the launcher that started it."""

import glob
import os
import re
import urllib.request
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from moelib.core.errors import UsageError, UserError
from moelib.runtime.platforms import has_tpu

# Ports of coordinators, above those that Linux gives to outgoing connections (32768 to 60999).
_FIRST_PORT, _NUM_PORTS = 61440, 4096
_TPU_PORT = 8482  # Open between the hosts of a Cloud TPU slice.
_METADATA_SECONDS = 10.0


_VARIABLES = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
_ADDRESS = r"([^\s:/\[\]]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})"


class Cluster(NamedTuple):
    """A job of several processes, as one of them sees it."""

    launcher: str  # Name of the launcher, for messages.
    coordinator: str | None  # Address of process 0, as host:port; None if the launcher has none.
    num_processes: int
    process_id: int
    local_size: int = 1  # Number of the job's processes on this host.
    local_id: int = 0  # Index of this process among them.
    # Settings of the coordinator, the number of processes and the index, for messages.
    settings: Sequence[str] = "--distributed_coordinator", "--num_processes", "--process_id"

    def check(self) -> None:
        """Raises UsageError if the address or the index of this process cannot be used."""
        address, number, index = self.settings
        found = re.fullmatch(_ADDRESS, self.coordinator or "")
        if not found or not 0 < int(found[2]) < 1 << 16:
            raise UsageError(
                f"{address}={self.coordinator}: set host:port, such as node1:8476 or "
                "[fd00::1]:8476, with a port from 1 to 65535."
            )
        if self.process_id >= self.num_processes:
            raise UsageError(
                f"{index}={self.process_id}: set less than {number}={self.num_processes}."
            )


def find_cluster(environ: Mapping[str, str] = os.environ, *, tpu: bool = True) -> Cluster | None:
    """Returns the job of this process, or None if its launcher started one process.

    Looks for JAX's variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, which
    `moelib launch` sets, then for Open MPI (4 and 5), SLURM (`srun`), GKE TPU slices, and Cloud TPU
    slices. Open MPI comes first, because `mpirun` inherits the variables of a SLURM job.

    Args:
        environ: Environment variables.
        tpu: Whether to look for TPU slices.

    Raises:
        UsageError: If the variables of a launcher are incomplete.
    """
    finders = _from_variables, _from_open_mpi, _from_slurm, *([_from_tpu] if tpu else [])
    found = next((cluster for find in finders if (cluster := find(environ))), None)
    return None if found is None or found.num_processes == 1 else found


def _from_variables(environ: Mapping[str, str]) -> Cluster | None:
    missing = [name for name in _VARIABLES if not environ.get(name)]
    if len(missing) == len(_VARIABLES):
        return None
    address, number, index = _VARIABLES
    if environ.get(number) == "1":
        return Cluster("JAX's variables", None, 1, 0)
    if missing:
        given = ", ".join(f"{name}={environ[name]}" for name in _VARIABLES if name not in missing)
        raise UsageError(f"{given}: {', '.join(missing)} is not set; set all three variables.")
    numbers = _integer(environ, number), _integer(environ, index)
    return Cluster("JAX's variables", environ[address], *numbers, settings=_VARIABLES)


def _from_open_mpi(environ: Mapping[str, str]) -> Cluster | None:
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    size, index, local_size, local_id = (
        _integer(environ, f"OMPI_COMM_WORLD_{name}")
        for name in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK")
    )
    # 123.0;tcp://10.0.0.1,10.1.0.1:34911 or 123.0;tcp6://[fd00::1,fd00::2]:34911, of mpirun, whose
    # host is usually that of process 0. Open MPI 5 has PMIX_NAMESPACE instead, without an address.
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    address = re.search(r"tcp://([^,:]+)|tcp6://(\[[^],]+)", uri)
    host = None
    if local_size == size:
        host = "localhost"
    elif address:
        host = address[1] or f"{address[2]}]"
    port = _port(environ.get("PMIX_NAMESPACE") or uri.partition(";")[0])
    return Cluster("Open MPI", host and f"{host}:{port}", size, index, local_size, local_id)


def _from_slurm(environ: Mapping[str, str]) -> Cluster | None:
    if "SLURM_STEP_NODELIST" not in environ or "SLURM_PROCID" not in environ:
        return None  # Also in a batch script, outside of srun.
    if (size := environ.get("SLURM_HET_SIZE", "1")) != "1":
        raise UsageError(
            f"SLURM_HET_SIZE={size}: the components of a heterogeneous job do not find each other; "
            f"submit a job of one component, or set {', '.join(_VARIABLES)} for each process."
        )
    hosts, tasks = environ["SLURM_STEP_NODELIST"], environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    # Tasks of each host, such as 4(x2),3 for 4, 4 and 3.
    sizes = [
        int(size)
        for size, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks)
        for _ in range(int(times or 1))
    ]
    node = int(environ.get("SLURM_NODEID", 0))
    port = _port(environ.get("SLURM_JOB_ID", "") + "." + environ.get("SLURM_STEP_ID", ""))
    return Cluster(
        "SLURM",
        f"{first_host(hosts)}:{port}",
        _integer(environ, "SLURM_STEP_NUM_TASKS"),
        _integer(environ, "SLURM_PROCID"),
        sizes[node] if node < len(sizes) else 1,
        int(environ.get("SLURM_LOCALID", 0)),
    )


def first_host(hosts: str) -> str:
    """Returns the first host of a node list of SLURM, such as node[01-16,20],login."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", hosts)
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first[0] if first else hosts)


def _from_tpu(environ: Mapping[str, str]) -> Cluster | None:
    if not has_tpu():
        return None
    hosts = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES")
    if hosts and "TPU_WORKER_ID" in environ:
        read: Callable[[str], str | None] = environ.get
        name, workers, index = "GKE TPU slice", hosts.split(","), _integer(environ, "TPU_WORKER_ID")
    elif "TPU_SKIP_MDS_QUERY" in environ or (worker := _metadata("agent-worker-number")) is None:
        return None
    else:
        # Either hosts, or name:id:address of each.
        endpoints = (_metadata("worker-network-endpoints") or "").split(",")
        name, workers, index = "Cloud TPU slice", [x.split(":")[-1] for x in endpoints], int(worker)
        settings = dict(re.findall(r"(?m)^(\w+): *'?([^'\n]*)", _metadata("tpu-env") or ""))
        read = lambda key: environ.get(key) or settings.get(key)
    host = (read("MEGASCALE_COORDINATOR_ADDRESS") or workers[0]).split(":")[0]
    num_slices, slice_id = (
        int(read(f"MEGASCALE_{key}") or default)
        for key, default in (("NUM_SLICES", 1), ("SLICE_ID", 0))
    )
    num = len(workers)
    return Cluster(name, f"{host}:{_TPU_PORT}", num * num_slices, slice_id * num + index)


def _metadata(key: str) -> str | None:
    """Returns an attribute of a virtual machine of Google Cloud, None if it has none."""
    server = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    url = f"http://{server}/computeMetadata/v1/instance/attributes/{key}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=_METADATA_SECONDS) as response:
            return response.read().decode().strip()
    except OSError:  # No such attribute, or no such server.
        return None


def gpus_of_process(local_size: int, local_id: int) -> list[int] | None:
    """Returns the indices of the visible GPUs that a process uses; None for all of them.

    The processes of a host share its GPUs evenly, unless the launcher shows each its own.

    Args:
        local_size: Number of processes on this host.
        local_id: Index of this process among them.

    Raises:
        UserError: If the processes cannot share the GPUs evenly.
    """
    num = len(_visible_gpus())
    bind = os.environ.get("SLURM_GPU_BIND") or os.environ.get("SLURM_GPUS_PER_TASK") or "none"
    is_bound = not bind.endswith("none")  # --gpu-bind=none undoes --gpus-per-task.
    if local_size == 1 or num < local_size or is_bound:
        return None
    each, rest = divmod(num, local_size)
    if rest:
        raise UserError(
            f"{local_size} processes of a host cannot share {num} GPUs evenly; start a number of "
            "processes per host that divides it, or set CUDA_VISIBLE_DEVICES for each."
        )
    return list(range(local_id * each, (local_id + 1) * each))


def visible_gpus_of_process(local_size: int, local_id: int) -> list[str] | None:
    """Returns CUDA's names of the GPUs of `gpus_of_process`."""
    indices = gpus_of_process(local_size, local_id)
    return None if indices is None else [_visible_gpus()[i] for i in indices]


def _visible_gpus() -> list[str]:
    """Returns CUDA's names of the GPUs that this process could use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    return [str(i) for i, _ in enumerate(glob.glob("/dev/nvidia[0-9]*"))]


def _port(job: str) -> int:
    """Returns a port for a job, the same in all of its processes."""
    return _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS


def _integer(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isdecimal():
        raise UsageError(f"{name}={text!r}: the launcher of this process must set it to a number.")
    return int(text)
