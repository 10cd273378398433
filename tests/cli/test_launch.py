"""The command that launches jobs."""

import shlex

import pytest

from cloud.slurm import SlurmJob
from moelib.cli import launch
from moelib.cli.main import run
from tests.docs import blocks

TRAIN = ["--module=tests.cli.test_launch", "--config=tiny", "--trainer_dir=runs/x"]


class OwnJob(SlurmJob):
    """A job whose class a user wrote."""


def named_trainer_configs():
    from tests import tiny

    return {"tiny": lambda: tiny.trainer_config("unused")}


def dry_run(capsys, *flags):
    assert run(["launch", "--dry_run", *TRAIN, *flags]) == 0
    return capsys.readouterr().out


def test_each_process_gets_the_flags_of_the_run(capsys):
    out = dry_run(capsys, "--num_processes=2", "--max_step=7", "--set=prng_seed=3", "--set=dir=x")
    first, second = out.splitlines()
    assert "JAX_PROCESS_ID=0" in first
    assert "JAX_PROCESS_ID=1" in second
    train = first.partition(" train ")[2].split()
    assert {*TRAIN, "--max_step=7", "--set=prng_seed=3", "--set=dir=x"} < set(train)
    assert "--stopped_status=75" in train
    assert not any("num_processes" in flag or "job" in flag for flag in train)


def test_fields_of_the_job_are_set(capsys):
    fields = "--job_set=partition=gpu", "--job_set=env={'A': 'b c'}", "--job_set=max_restarts=3"
    out = dry_run(capsys, "--job=slurm", "--num_processes=4", *fields)
    assert "#SBATCH --partition=gpu\n" in out
    assert "#SBATCH --nodes=4\n" in out
    assert "export A='b c'\n" in out
    assert "-lt 3 ]" in out
    assert out.splitlines()[-1] == "sbatch runs/x/job/job.sbatch"


def _commands_of_page():
    texts = [each.text.replace("\\\n", "") for each in blocks.blocks("docs/how_to/clusters.md")]
    return [
        line for text in texts for line in text.splitlines() if line.startswith("moelib launch")
    ]


@pytest.mark.parametrize("command", _commands_of_page())
def test_the_commands_of_the_page_describe_jobs(capsys, command):
    arguments = [x for x in shlex.split(command)[2:] if not x.startswith(("--module", "--config"))]
    folder = arguments.pop(next(i for i, x in enumerate(arguments) if "trainer_dir" in x))
    assert folder in dry_run(capsys, *arguments, folder)


def test_a_job_may_be_a_class_of_ones_own():
    flags = launch.Flags(job="tests.cli.test_launch:OwnJob", trainer_dir="x")
    assert type(launch.job_config(flags).instantiate()).__name__ == "OwnJob"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--job=slrm"], "--job=slrm: unknown kind of job; did you mean 'slurm'?"),
        (["--job=tests.cli.test_launch:Missing"], "tests.cli.test_launch has no 'Missing'"),
        (["--process_id=1"], "--process_id=1: the job sets it"),
        (["--num_processes=0"], "num_processes"),
        (["--job_set=partition=gpu"], "partition"),
        (["--job=slurm", "--job_set=max_restarts=many"], "max_restarts"),
        (["--set=max_stepp=7"], "max_stepp"),  # Of the run: found before the job waits.
        (["--set=num_microbatches=3"], "num_microbatches"),
    ],
)
def test_wrong_flags_are_refused_before_anything_starts(capsys, flags, message):
    assert run(["launch", *TRAIN, *flags]) == 2
    assert message in capsys.readouterr().err


def test_the_folder_of_the_run_is_required(capsys):
    assert run(["launch", *TRAIN[:2], "--set=dir="]) == 2
    assert "--trainer_dir" in capsys.readouterr().err
