"""Jobs of SLURM: their script, and a job that a real SLURM runs, requeues and ends bit-equal."""

import os
import signal
import subprocess

import pytest

from cloud.slurm import SlurmJob
from moelib.core.errors import UserError
from tests.cloud.real_slurm import output, slurm
from tests.cloud.small_run import launch, losses, processes_of, wait_for, write_model

__all__ = ["slurm"]  # A fixture.


def script(**fields):
    fields = {"arguments": ["train"], "folder": "runs/a/job", **fields}
    cfg = SlurmJob.default_config().set(**fields)
    return cfg.instantiate().files()["job.sbatch"]


def test_the_script_asks_for_nodes_and_gpus():
    text = script(
        num_processes=16,
        processes_per_node=8,
        gpus_per_node=8,
        time_limit="2-00:00:00",
        env={"NCCL_DEBUG": "WARN ING"},
        setup=["module load cuda"],
        options=["--exclusive", "--comment='a # b'"],
    )
    lines = text.splitlines()
    for line in (
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=8",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --time=2-00:00:00",
        "#SBATCH --signal=TERM@120",
        "#SBATCH --requeue",
        "#SBATCH --exclusive",
        "#SBATCH --comment='a # b'",
        "export NCCL_DEBUG='WARN ING'",
        "module load cuda",
    ):
        assert line in lines
    assert "--partition" not in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize(
    ("status", "restarts", "requeued"),
    [
        *[(0, 0, False), (2, 0, False), (75, 0, True), (88, 9, True), (137, 10, False)],
        # Others were ended by srun, or by themselves, after one process had an error or was killed.
        *[("1 143", 0, False), ("88 2 143", 0, False), ("137 88", 0, True), ("88 139", 0, True)],
    ],
)
def test_a_job_is_queued_again_where_its_run_can_resume(tmp_path, status, restarts, requeued):
    """The fake srun runs its command for each status in turn, and ends with the highest."""
    (tmp_path / "srun").write_text(
        f"#!/bin/bash\nwhile [[ $1 = --* ]]; do shift; done\nfor each in {status}; do\n"
        '    "${@:1:4}" sh -c "exit $each"\ndone\n'
        f"exit {max(map(int, str(status).split()))}\n"
    )
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho scontrol "$@"\n')
    for name in ("srun", "scontrol"):
        (tmp_path / name).chmod(0o755)
    (tmp_path / "a'b %d").mkdir()
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "71",
        "SLURM_RESTART_COUNT": str(restarts),
    }
    done = subprocess.run(
        ["bash"],
        input=script(folder=str(tmp_path / "a'b %d")),
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    first = next((x for x in map(int, str(status).split()) if x != 88), 88)
    assert done.returncode == first
    assert ("scontrol requeue 71" in done.stdout) == requeued


def test_the_folder_may_have_spaces_and_percent_signs():
    lines = script(folder="/r/50% of $x").splitlines()
    assert '#SBATCH --output="/r/50%% of $x/job-%j.log"' in lines
    (srun,) = [line for line in lines if line.startswith("srun")]
    assert "'--output=/r/50%% of $x/processes-%j.log'" in srun


@pytest.mark.parametrize("limit", ["30", "30:00", "24:00:00", "2-00", "2-00:00:00", "UNLIMITED"])
def test_time_limits_of_slurm_are_accepted(limit):
    assert f"#SBATCH --time={limit}\n" in script(time_limit=limit)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_processes": 9, "processes_per_node": 8}, "num_processes=9 .*processes_per_node=8"),
        ({"options": ["exclusive"]}, "options='exclusive'"),
        ({"options": ["--nice\ntouch x"]}, r"options='--nice\\ntouch x'"),
        ({"options": ["--comment='a"]}, "options="),
        ({"partition": "a b"}, "partition='a b'"),
        ({"name": "it's"}, "name=.it's"),
        ({"account": "a#b"}, "account='a#b'"),
        ({"time_limit": "1h"}, "time_limit='1h'.*HH:MM:SS"),
        ({"folder": 'a"b'}, 'a"b'),
        ({"name": "x\n#SBATCH --uid=0"}, "name="),
    ],
)
def test_fields_that_sbatch_would_misread_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        script(**fields)


@pytest.mark.slow
def test_a_real_slurm_queues_a_job_again_that_ends_bit_equal(slurm, tmp_path):
    write_model(tmp_path)
    launch(tmp_path, "--job=local", "--trainer_dir=whole")
    slurm_flags = "--job=slurm", "--job_set=processes_per_node=2", "--trainer_dir=killed"
    number = launch(tmp_path, *slurm_flags).split()[-1]
    run = tmp_path / "killed"
    wait_for((run / "checkpoints" / "step_00000010").exists)
    pids = processes_of("--trainer_dir=killed")
    os.kill(pids[-1], signal.SIGKILL)
    wait_for(lambda: "PENDING" in output("squeue", "-h", "-o", "%T", "-j", number))
    wait_for(lambda: "step 50/50" in (run / "job" / f"processes-{number}.log").read_text())
    wait_for(lambda: "JobState=COMPLETED" in output("scontrol", "show", "job", number))
    assert "the job is queued again" in (run / "job" / f"job-{number}.log").read_text()
    assert losses(run) == losses(tmp_path / "whole")
