"""Jobs of several processes: flags, devices of each process, and refusals."""

import logging

import pytest

from moelib.core.errors import UsageError, UserError
from moelib.parallel.mesh import MESH_AXIS_NAMES, create_device_mesh, mesh_shape_from_axes
from moelib.runtime import distributed
from moelib.runtime.cluster import Cluster, gpus_of_process


@pytest.mark.parametrize(
    ("visible", "local_size", "local_id", "expected"),
    [
        ("0,1,2,3,4,5,6,7", 1, 0, None),  # One process per host uses all.
        ("0,1,2,3,4,5,6,7", 8, 3, [3]),
        ("0,1,2,3,4,5,6,7", 2, 1, [4, 5, 6, 7]),
        ("3", 4, 3, None),  # The launcher shows each process its own.
    ],
)
def test_processes_of_a_host_share_its_gpus(monkeypatch, visible, local_size, local_id, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus_of_process(local_size, local_id) == expected


def test_gpus_bound_by_slurm_are_kept(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "2")
    assert gpus_of_process(2, 1) is None
    monkeypatch.setenv("SLURM_GPU_BIND", "none")  # "Turns off implicit binding", srun(1).
    assert gpus_of_process(2, 1) == [1]


def test_gpus_that_processes_cannot_share_are_refused(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    with pytest.raises(UserError, match="2 processes of a host cannot share 3 GPUs"):
        gpus_of_process(2, 0)


def test_a_job_without_an_address_requires_one(monkeypatch):
    job = Cluster("Open MPI", None, 2, 0)
    monkeypatch.setattr(distributed, "find_cluster", lambda **_: job)
    with pytest.raises(UsageError, match=r"Open MPI .*--distributed_coordinator"):
        distributed.initialize_distributed()


def test_an_address_without_a_job_is_refused():
    with pytest.raises(UsageError, match=r"--distributed_coordinator=n1:1.*--num_processes"):
        distributed.initialize_distributed("n1:1")


def test_a_setting_that_is_wrong_is_named_by_its_source(monkeypatch):
    for name, text in {"NUM_PROCESSES": "2", "PROCESS_ID": "5"}.items():
        monkeypatch.setenv(f"JAX_{name}", text)
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "n1:99999")
    with pytest.raises(UsageError, match=r"^JAX_COORDINATOR_ADDRESS=n1:99999"):
        distributed.initialize_distributed()
    with pytest.raises(UsageError, match=r"^JAX_PROCESS_ID=5.*JAX_NUM_PROCESSES=2"):
        distributed.initialize_distributed("n1:1")
    with pytest.raises(UsageError, match=r"^--distributed_coordinator=n2"):
        distributed.initialize_distributed("n2")
    with pytest.raises(UsageError, match=r"^--process_id=2.*--num_processes=2"):
        distributed.initialize_distributed("n1:1", 2, 2)
    assert distributed.initialize_distributed(num_processes=1) is None


@pytest.mark.parametrize("step", [{}, {"SLURM_STEP_NODELIST": "n1", "SLURM_STEP_NUM_TASKS": "1"}])
def test_one_process_of_a_slurm_job_is_named(monkeypatch, caplog, step):
    """The second one is the shell of salloc, as an interactive step."""
    for name, text in {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", **step}.items():
        monkeypatch.setenv(name, text)
    with caplog.at_level(logging.WARNING):
        assert distributed.initialize_distributed() is None
    assert "SLURM_NTASKS=8" in caplog.text


@pytest.mark.parametrize(
    ("host", "local_size", "expected"),
    [
        ("localhost", 1, "localhost:7"),
        ("127.0.0.1", 1, "127.0.0.1:7"),
        ("own-name", 1, "0.0.0.0:7"),  # Which the host resolves to 127.0.1.1.
        ("own-name", 2, "own-name:7"),  # No other host connects.
        ("elsewhere", 1, "elsewhere:7"),
    ],
)
def test_process_0_listens_where_other_hosts_reach_it(monkeypatch, host, local_size, expected):
    addresses = {"own-name": "127.0.1.1", "elsewhere": "192.0.2.7"}
    monkeypatch.setattr("socket.gethostbyname", lambda name: addresses.get(name, "127.0.0.1"))
    assert distributed._bind_address(Cluster("", "", 2, 0, local_size), f"{host}:7") == expected


def test_a_host_with_fewer_devices_is_named(monkeypatch):
    parts = [
        {"host": "n1", "devices": 8},
        {"host": "n2", "devices": 8},
        {"host": "n3", "devices": 7},
    ]
    monkeypatch.setattr(distributed, "gather_json", lambda _: parts)
    monkeypatch.setattr("jax.process_count", lambda: 3)
    monkeypatch.setattr("jax.distributed.is_initialized", lambda: True)
    with pytest.raises(UserError, match="process 2 on n3 has 7 devices, process 0 on n1 8"):
        distributed.check_job()


def test_a_clock_that_is_wrong_is_a_warning(monkeypatch, caplog):
    parts = [{"host": "n1", "devices": 8}, {"host": "n2", "devices": 8}]
    gathered = iter([parts, [1000.0, 700.0]])
    monkeypatch.setattr(distributed, "gather_json", lambda _: next(gathered))
    monkeypatch.setattr("jax.process_count", lambda: 2)
    monkeypatch.setattr("jax.distributed.is_initialized", lambda: True)
    distributed.check_job()
    assert "the clock of n2 is -300 s from that of n1" in caplog.text


def test_processes_that_are_not_connected_are_refused(monkeypatch):
    monkeypatch.setattr("jax.process_count", lambda: 4)
    with pytest.raises(UserError, match=r"4 processes.*initialize_distributed"):
        distributed.check_job()


def test_a_process_is_described_by_its_coordinates():
    axes = mesh_shape_from_axes(expert=2, fsdp=4)
    mesh = create_device_mesh(axes, MESH_AXIS_NAMES)
    some = mesh.devices.reshape(2, 4)[1, 2:]
    assert distributed.coordinates(mesh, set(some)) == "expert=1,fsdp=2-3"
    assert distributed.coordinates(mesh, {some[0]}) == "expert=1,fsdp=2"
