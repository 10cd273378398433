"""The command that launches jobs."""

import re
import shlex

import pytest

from cloud.slurm import SlurmJob
from docs import generate
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


CANARY = "canary-4f1d9"
KEY = "summary_writer.trackers.wandb.api_key"
WANDB = "--set=summary_writer.trackers.wandb=moelib.runs.tracker:WandbTracker"


@pytest.mark.parametrize(
    ("command", "flags", "cure"),
    [
        ("train", [WANDB, f"--set={KEY}={CANARY}"], "env:NAME"),
        ("config", [WANDB, f"--set={KEY}={CANARY}"], "env:NAME"),
        ("config --explain", [WANDB, f"--set={KEY}={CANARY}"], "env:NAME"),
        ("plan --topology=v6e:2x2", [WANDB, f"--set={KEY}={CANARY}"], "env:NAME"),
        ("launch --dry_run", [WANDB, f"--set={KEY}={CANARY}"], "env:NAME"),
        ("launch --dry_run", [WANDB, f"--set={KEY}=env:{CANARY}"], "env:NAME"),
        ("config --explain", [f"--set={KEY}={CANARY}"], "wandb"),
        ("config --explain", [f"--set=input.name=https://me:{CANARY}@host"], "input.*name"),
        ("train", [f"--set=dir=https://me:{CANARY}@host"], r"me:\*\*\*@host"),
        (
            "launch --dry_run --job=kubernetes",
            [f"--job_set=env={{'HF_TOKEN': '{CANARY}'}}"],
            "HF_TOKEN",
        ),
        (
            "launch --dry_run --job=xmanager",
            [f"--job_set=env={{'MY_API_KEY': ['{CANARY}']}}"],
            "MY_API_KEY",
        ),
    ],
)
def test_no_command_shows_a_secret(tmp_path, monkeypatch, capfd, command, flags, cure):
    monkeypatch.chdir(tmp_path)
    folder = [] if command.startswith(("config", "plan")) else [f"--trainer_dir={tmp_path}/x"]
    image = ["--job_set=image=i"] if "--job" in command else []
    assert run([*command.split(), *TRAIN[:2], *folder, *image, *flags]) == 2
    out, err = capfd.readouterr()
    assert re.search(cure, err)
    assert CANARY not in out + err
    assert not [x for x in tmp_path.rglob("*") if x.is_file() and CANARY in x.read_text()]


def test_references_to_secrets_are_shown(capsys, monkeypatch):
    monkeypatch.setenv("MY_KEY", CANARY)
    for command in ("config", "config --explain"):
        assert run([*command.split(), *TRAIN[:2], WANDB, f"--set={KEY}=env:MY_KEY"]) == 0
        out = capsys.readouterr().out
        assert f"{KEY}: 'env:MY_KEY'" in out
        assert CANARY not in out
    assert CANARY not in dry_run(capsys, WANDB, f"--set={KEY}=env:MY_KEY")


def _commands_of_page():
    pages = (generate.ROOT / "docs/how_to").glob("clusters*.md")
    commands = [x for page in sorted(pages) for x in blocks.commands(str(page))]
    return [line for line in commands if line.startswith("moelib launch")]


@pytest.mark.parametrize("command", _commands_of_page())
def test_the_commands_of_the_page_describe_jobs(capsys, command):
    arguments = [x for x in shlex.split(command)[2:] if not x.startswith(("--module", "--config"))]
    folder = arguments.pop(next(i for i, x in enumerate(arguments) if "trainer_dir" in x))
    assert folder in dry_run(capsys, *arguments, folder)


def test_the_exit_status_of_a_stopped_run_is_that_of_the_user(capsys):
    out = dry_run(capsys, "--job=slurm", "--stopped_status=80")
    assert "--stopped_status=80" in out
    assert "case $status in 80|87|" in out
    assert "75" not in out


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
        (["--stopped_status=1"], "stopped_status=1"),
        (["--job_set=partition=gpu"], "partition"),
        (["--job=slurm", "--job_set=max_restarts=many"], "max_restarts"),
        (["--job=kubernetes"], "--job=kubernetes: set image by --job_set=image="),
        (["--trainer_dir=", "--set=dir="], "--trainer_dir"),
        (["--set=max_stepp=7"], "max_stepp"),  # Of the run: found before the job waits.
        (["--set=num_microbatches=3"], "num_microbatches"),
    ],
)
def test_wrong_flags_are_refused_before_anything_starts(capsys, flags, message):
    assert run(["launch", *TRAIN, *flags]) == 2
    assert message in capsys.readouterr().err
