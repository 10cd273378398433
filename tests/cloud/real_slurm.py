"""A real SLURM on this machine, of the Debian packages slurmctld, slurmd and slurm-client."""

import os
import shutil
import socket
import subprocess

import pytest

# A job that is queued again starts when its credentials have expired: after 5 s instead of 120 s.
_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES State=UP
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Runs a cluster of this machine, and returns its folder."""
    daemons = ("slurmctld", "slurmd")
    if os.geteuid() or not all(map(shutil.which, (*daemons, "sbatch"))):
        pytest.skip("needs root, and the packages slurmctld, slurmd and slurm-client")
    folder = tmp_path / "slurm"
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    with socket.socket() as one, socket.socket() as two:
        for each in (one, two):
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in (one, two)]
    text = _CONF.format(host=socket.gethostname(), ports=ports, folder=folder, cpus=os.cpu_count())
    (folder / "slurm.conf").write_text(text)
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    processes = [subprocess.Popen([name, "-D"], stderr=subprocess.DEVNULL) for name in daemons]
    yield folder
    for process in reversed(processes):
        process.terminate()
        process.wait(timeout=30)


def output(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
