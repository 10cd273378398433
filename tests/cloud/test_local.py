"""Processes on this machine: one that is lost ends all, and all start again."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

from cloud.local import LocalJob
from moelib.core.errors import UserError
from moelib.runtime.cluster import find_cluster
from moelib.runtime.lock import directory_lock
from tests.cloud.small_run import FLAGS, launch, losses, processes_of, wait_for, write_model

OUTER_JOB = {"JAX_COORDINATOR_ADDRESS": "n:1", "JAX_NUM_PROCESSES": "8", "JAX_PROCESS_ID": "3"}

# A process that ends as its argument for this start says: w waits, a number is an exit status, k
# kills itself. `starts` has a line per start.
_PROGRAM = """
import os, pathlib, signal, sys, time
folder, *plans = sys.argv[1:]
index = int(os.environ.get("JAX_PROCESS_ID", 0))
with open(f"{folder}/starts_{index}", "a") as file:
    file.write(f"{os.getpid()} {os.environ.get('JAX_COORDINATOR_ADDRESS')}\\n")
start = len(pathlib.Path(f"{folder}/starts_{index}").read_text().splitlines()) - 1
plan = plans[index].split(",")[start]
print(f"process {index}: {plan}", flush=True)
if plan == "k":
    os.kill(os.getpid(), signal.SIGKILL)
if plan == "s":  # Saves at SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
if plan in "ws":
    time.sleep(60)
sys.exit(int(plan))
"""


def job(folder, *plans, **fields):
    return LocalJob.default_config().set(
        **{
            "program": [sys.executable, "-S", "-c", _PROGRAM],
            "arguments": [str(folder), *plans],
            "folder": str(folder),
            "num_processes": len(plans),
            "grace_seconds": 0.2,
            **fields,
        }
    )


def starts(folder, index):
    path = folder / f"starts_{index}"
    return [line.split() for line in path.read_text().splitlines()]


def test_processes_know_their_job_and_write_logs(tmp_path, capsys):
    assert job(tmp_path, "0", "0", "0").instantiate().launch() == 0
    addresses = {starts(tmp_path, i)[0][1] for i in range(3)}
    assert len(addresses) == 1
    assert (tmp_path / "process_2.log").read_text() == "process 2: 0\n"
    assert capsys.readouterr().out == "process 0: 0\n"


def test_one_process_needs_no_coordinator(tmp_path, monkeypatch):
    for name, text in OUTER_JOB.items():
        monkeypatch.setenv(name, text)
    assert "JAX_NUM_PROCESSES=1 " in job(tmp_path, "0").instantiate().describe()
    assert find_cluster(OUTER_JOB | {"JAX_NUM_PROCESSES": "1"}) is None


def test_a_folder_is_used_by_one_job(tmp_path):
    with (
        directory_lock(str(tmp_path), setting="--trainer_dir"),
        pytest.raises(UserError, match=rf"{tmp_path} is in use \(process {os.getpid()} on"),
    ):
        job(tmp_path, "0").instantiate().launch()
    assert not (tmp_path / "starts_0").exists()


def test_a_folder_that_cannot_be_created_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"/file/job.*--trainer_dir"):
        job(tmp_path, "0").set(folder=str(tmp_path / "file" / "job")).instantiate().launch()


def test_one_process_starts(tmp_path):
    assert job(tmp_path, "0").instantiate().launch() == 0
    assert len(starts(tmp_path, 0)) == 1


@pytest.mark.parametrize("plans", [["w,0", "k,0"], ["k,0", "w,0"], ["88,0", "75,0"]])
def test_a_lost_process_ends_all_which_start_again(tmp_path, capsys, plans):
    assert job(tmp_path, *plans).instantiate().launch() == 0
    assert [len(starts(tmp_path, i)) for i in range(2)] == [2, 2]
    assert "Restart 1 of at most 10" in capsys.readouterr().err


def test_restarts_are_limited(tmp_path, capsys):
    assert job(tmp_path, "k,k,k,0", max_restarts=2).instantiate().launch() == 137
    assert len(starts(tmp_path, 0)) == 3
    assert "process_0.log" in capsys.readouterr().err


@pytest.mark.parametrize("status", [1, 2])
@pytest.mark.parametrize("other", ["w", "88"])  # An end that follows may be seen first.
def test_an_error_is_not_repeated(tmp_path, status, other):
    fields = {"grace_seconds": 5} if other == "88" else {}
    assert job(tmp_path, other, str(status), **fields).instantiate().launch() == status
    assert len(starts(tmp_path, 1)) == 1


def test_a_run_continues_after_the_status_that_it_was_given(tmp_path):
    assert job(tmp_path, "80,0", stopped_status=80).instantiate().launch() == 0
    assert len(starts(tmp_path, 0)) == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_processes": 0}, "num_processes=0"),
        ({"max_restarts": -1}, "max_restarts=-1"),
        ({"stopped_status": 2}, "stopped_status=2"),
        ({"env": {"A B": ""}}, "env has 'A B'"),
    ],
)
def test_wrong_fields_are_refused(tmp_path, fields, message):
    with pytest.raises(UserError, match=message):
        job(tmp_path, "0", **fields).instantiate()


_LAUNCHER = "import sys; from tests.cloud.test_local import run; run(sys.argv[1], sys.argv[2:])"


def run(folder, plans):
    sys.exit(job(folder, *plans, grace_seconds=20).instantiate().launch())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_signals_to_the_launcher_end_the_processes(tmp_path, number):
    command = [sys.executable, "-c", _LAUNCHER, str(tmp_path), "s", "s"]
    launcher = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.getcwd()})
    logs = [tmp_path / f"process_{i}.log" for i in range(2)]
    while not all(log.exists() and log.read_text() for log in logs):
        time.sleep(0.05)
    time.sleep(0.2)  # Until the handlers are set.
    launcher.send_signal(number)
    assert launcher.wait() == (-9 if number == signal.SIGKILL else 0)
    pids = [int(starts(tmp_path, i)[0][0]) for i in range(2)]
    while any(_is_running(pid) for pid in pids):  # The suite's own limit of time ends it.
        time.sleep(0.05)
    assert len(starts(tmp_path, 0)) == 1


def _is_running(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_processes_share_the_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    text = job(tmp_path, "0", "0").instantiate().describe()
    assert "JAX_PROCESS_ID=0 CUDA_VISIBLE_DEVICES=4,5 " in text
    assert "JAX_PROCESS_ID=1 CUDA_VISIBLE_DEVICES=6,7 " in text


@pytest.mark.slow
def test_a_run_that_loses_processes_at_random_moments_ends_bit_equal(tmp_path):
    write_model(tmp_path)
    launch(tmp_path, "--trainer_dir=whole")
    chosen = random.Random(0)
    launcher = launch(tmp_path, "--trainer_dir=killed", wait=False)
    folder = tmp_path / "killed"
    log = folder / "job" / "process_0.log"
    for restart in (1, 2):
        wait_for(lambda n=restart: log.exists() and log.read_text().count("first step") == n)
        time.sleep(chosen.uniform(0, 3))
        os.kill(chosen.choice(processes_of("--trainer_dir=killed")), signal.SIGKILL)
    _, errors = launcher.communicate()
    assert launcher.returncode == 0, errors
    assert "Restart 2 of at most 10" in errors
    assert losses(folder) == losses(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs the package openmpi-bin")
def test_mpirun_starts_a_run_without_flags(tmp_path):
    write_model(tmp_path)
    launch(tmp_path, "--trainer_dir=local")
    mpirun = "mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"
    command = [*mpirun, sys.executable, "-m", "moelib", "train", *FLAGS, "--trainer_dir=mpi"]
    env = {**os.environ, "PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert "Process 1 of 2" in done.stderr
    assert losses(tmp_path / "mpi") == losses(tmp_path / "local")
