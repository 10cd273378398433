"""Jobs found in the environment of a process, as real launchers set it."""

import contextlib
import http.server
import re
import threading

import pytest

from moelib.core.errors import UsageError
from moelib.runtime import cluster
from moelib.runtime.cluster import Cluster, find_cluster, first_host

# As SLURM 22.05 sets them: three of four tasks on the first of two hosts.
SLURM = {
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[007-008]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
    "SLURM_NTASKS": "4",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "2",
}
# As Open MPI 4.1 sets them.
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_MCA_orte_hnp_uri": "2143485952.0;tcp://192.0.2.2,198.51.100.2:52645;tcp6://[fd00::2]:46",
}


def test_a_job_of_slurm():
    found = find_cluster(SLURM)
    host, port = found.coordinator.split(":")
    assert found == Cluster("SLURM", f"{host}:{port}", 4, 2, local_size=3, local_id=2)
    assert host == "node007"
    assert 61440 <= int(port) < 65536
    other = find_cluster(SLURM | {"SLURM_PROCID": "3", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"})
    assert other == Cluster("SLURM", found.coordinator, 4, 3, local_size=1, local_id=0)
    assert find_cluster(SLURM | {"SLURM_STEP_ID": "1"}).coordinator != found.coordinator


def test_the_script_of_a_slurm_job_is_one_process():
    script = {name: text for name, text in SLURM.items() if "STEP" not in name}
    assert find_cluster(script | {"SLURM_PROCID": "0"}) is None


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("vm", "vm"),
        ("node001,host2", "node001"),
        ("node[001-0015],host2", "node001"),
        ("node[001,007-015]", "node001"),
        ("rack[3-4]node[07-09,11]-gpu,login", "rack3node07-gpu"),
    ],
)
def test_the_first_host_of_a_list(hosts, first):
    assert first_host(hosts) == first


def test_a_job_of_open_mpi():
    found = find_cluster(SLURM | OPEN_MPI)  # In a job of SLURM.
    assert found.coordinator.startswith("192.0.2.2:")
    assert found[2:6] == (8, 5, 4, 1)
    on_one_host = find_cluster(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"})
    assert on_one_host.coordinator.startswith("localhost:")
    uri = {"OMPI_MCA_orte_hnp_uri": "7.0;tcp6://[fd00::2,fd00::3]:46627"}
    assert find_cluster(OPEN_MPI | uri).coordinator.startswith("[fd00::2]:")


def test_open_mpi_5_names_no_address():
    version_5 = OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "", "PMIX_NAMESPACE": "prterun-n1-1234@1"}
    assert find_cluster(version_5).coordinator is None


def test_variables_come_first():
    job = {"JAX_COORDINATOR_ADDRESS": "a-0.a:1234", "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "0"}
    expected = Cluster("JAX's variables", "a-0.a:1234", 3, 0, settings=tuple(job))
    assert find_cluster(SLURM | job) == expected
    assert find_cluster(job | {"JAX_NUM_PROCESSES": "1"}) is None
    with pytest.raises(UsageError, match=r"JAX_PROCESS_ID=3.*JAX_NUM_PROCESSES=3"):
        find_cluster(job | {"JAX_PROCESS_ID": "3"}).check()
    with pytest.raises(UsageError, match=r"JAX_NUM_PROCESSES=3.* JAX_PROCESS_ID is not set"):
        find_cluster({"JAX_NUM_PROCESSES": "3"})


def test_one_process_ignores_the_variables_of_an_outer_job():
    assert find_cluster(SLURM | {"JAX_NUM_PROCESSES": "1"}) is None


def test_heterogeneous_jobs_of_slurm_are_refused():
    with pytest.raises(UsageError, match=r"SLURM_HET_SIZE=2.*JAX_COORDINATOR_ADDRESS"):
        find_cluster(SLURM | {"SLURM_HET_SIZE": "2"})


@pytest.mark.parametrize(
    "address", ["localhost:99999", "n:0", "my host:77", "host", ":80", "::1:80", "[::1]", "h:x"]
)
def test_addresses_without_a_host_or_port_are_refused(address):
    with pytest.raises(UsageError, match=f"--distributed_coordinator={re.escape(address)}: set"):
        Cluster("flags", address, 2, 0).check()


@pytest.mark.parametrize("address", ["[::1]:80", "10.0.0.2:65535", "a-0.a:1234", "node_1:80"])
def test_addresses_of_a_host_and_a_port_are_accepted(address):
    job = {"JAX_COORDINATOR_ADDRESS": address, "JAX_PROCESS_ID": "0", "JAX_NUM_PROCESSES": "2"}
    found = find_cluster(job)
    found.check()
    assert (found.coordinator, found.num_processes) == (address, 2)


def test_a_number_that_is_none_is_named():
    with pytest.raises(UsageError, match="SLURM_PROCID='x'"):
        find_cluster(SLURM | {"SLURM_PROCID": "x"})


@pytest.fixture
def tpu(monkeypatch):
    monkeypatch.setattr(cluster, "has_tpu", lambda: True)


def test_slices_of_gke(tpu):
    job = {"TPU_WORKER_HOSTNAMES": "t-0.t,t-1.t,t-2.t,t-3.t", "TPU_WORKER_ID": "1"}
    assert find_cluster(job)[1:6] == ("t-0.t:8482", 4, 1, 1, 0)
    slices = {
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "1",
        "MEGASCALE_COORDINATOR_ADDRESS": "s-0.s:8080",
    }
    assert find_cluster(job | slices)[1:6] == ("s-0.s:8482", 8, 5, 1, 0)
    assert find_cluster(job, tpu=False) is None
    assert find_cluster({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}) is None


@contextlib.contextmanager
def metadata_server(attributes):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            _, _, key = self.path.partition("/computeMetadata/v1/instance/attributes/")
            is_known = key in attributes and self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200 if is_known else 404)
            self.end_headers()
            self.wfile.write(attributes.get(key, "").encode())

        def log_message(self, format, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("endpoints", "settings", "expected"),
    [
        ("10.0.0.2,10.0.0.3", "", ("10.0.0.2:8482", 2, 1)),
        ("x:1:10.0.0.2,x:2:10.0.0.3", "ZONE: 'z'\n", ("10.0.0.2:8482", 2, 1)),
        (
            "a:1:10.0.1.2,a:2:10.0.1.3",
            "MEGASCALE_COORDINATOR_ADDRESS: '10.0.0.2'\nMEGASCALE_NUM_SLICES: 3\n\
MEGASCALE_SLICE_ID: 1",
            ("10.0.0.2:8482", 6, 3),
        ),
    ],
)
def test_slices_of_cloud_tpus(tpu, monkeypatch, endpoints, settings, expected):
    attributes = {"agent-worker-number": "1", "worker-network-endpoints": endpoints}
    with metadata_server(attributes | {"tpu-env": settings}) as address:
        monkeypatch.setenv("GCE_METADATA_HOST", address)
        assert find_cluster({})[1:4] == expected
        assert find_cluster({"TPU_SKIP_MDS_QUERY": "1"}) is None
    with metadata_server({}) as address:
        monkeypatch.setenv("GCE_METADATA_HOST", address)
        assert find_cluster({}) is None
