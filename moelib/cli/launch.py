r"""`moelib launch`: trains a config in several processes, on this machine or a cluster.

moelib launch --job=local --num_processes=4 -m M -c C --trainer_dir=RUN --num_cpu_devices=2
moelib launch --job=slurm --num_processes=8 --job_set=gpus_per_node=8 -m M -c C --trainer_dir=RUN
moelib launch --job=kubernetes --job_set=image=I --job_set="volumes={'/v': 'claim'}" -m M -c C \
    --trainer_dir=/v/RUN

The flags of `moelib train` are passed on to each process. --dry_run prints the files and commands
of the job, and starts nothing.
"""

import dataclasses
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from moelib import launch
from moelib.core import config_text
from moelib.core.config import RequiredFieldMissingError, config_origin, did_you_mean
from moelib.core.errors import UsageError
from moelib.core.module_names import find_module
from moelib.runtime import storage
from moelib.runtime.command_line import describe_flags, flag, no_arguments

JOBS = {
    "local": "cloud.local:LocalJob",
    "slurm": "cloud.slurm:SlurmJob",
    "kubernetes": "cloud.kubernetes:KubernetesJob",
    "gcp_tpu": "cloud.gcp_tpu:TpuVmJob",
    "xmanager": "cloud.xmanager:XManagerJob",
}
_OF_A_PROCESS = "process_id", "distributed_coordinator"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(launch.TrainFlags):
    """Flags of the command."""

    job: str = flag("local", f"Kind of job: {', '.join(JOBS)}, or the module:Class of one's own.")
    job_set: tuple[str, ...] = flag((), "Field of the job and its value, such as partition=gpu.")
    dry_run: bool = flag(False, "Print the files and commands of the job, and start nothing.")


def run(flags: Flags, arguments: Sequence[str]) -> None:
    """Checks the config of the run, and launches the job. Exits with the job's exit status."""
    no_arguments(arguments, Flags)
    for name in _OF_A_PROCESS:
        if (value := getattr(flags, name)) is not None:
            raise UsageError(f"--{name}={value}: the job sets it for each process; leave it unset.")
    cfg = flags.load()
    launch.check_data_dir(cfg)
    if not cfg.dir:
        raise UsageError("--trainer_dir is required: the folder that the run writes to.")
    cfg.instantiate(parent=None)  # Raises errors of the config before the job waits in a queue.
    try:
        job = job_config(flags).instantiate()
    except RequiredFieldMissingError as error:
        name = error.args[1][0]
        raise UsageError(f"--job={flags.job}: set {name} by --job_set={name}=VALUE.") from error
    job.check_trainer_dir(cfg.dir)
    if flags.dry_run:
        print(job.describe())
    elif status := job.launch():
        sys.exit(status)


def job_config(flags: Flags) -> Any:
    """Returns the config of the job that the flags describe.

    Raises:
        UsageError: If there is no such kind of job.
        UnknownFieldError: If the job has no field of --job_set.
        InvalidConfigValueError: If a value of --job_set is not one of its field.
    """
    reference = JOBS.get(flags.job, flags.job)
    if ":" not in reference:
        raise UsageError(f"--job={flags.job}: unknown kind of job; {did_you_mean(flags.job, JOBS)}")
    module, _, name = reference.partition(":")
    if flags.job in JOBS:
        found = importlib.import_module(find_module(module) or module)
    else:
        found = launch.import_module(module)
    if not hasattr(found, name):
        raise UsageError(f"--job={flags.job}: {module} has no {name!r}.")
    job = getattr(found, name)
    cfg, run_dir = job.default_config(), flags.trainer_dir or ""
    if job.shares_files and not storage.is_remote(run_dir):
        folder = os.path.join(run_dir, "job")
    else:
        folder = os.path.join("jobs", os.path.basename(os.path.normpath(run_dir)))
    cfg.set(folder=folder)
    for field in ("stopped_status", "num_processes"):
        if value := getattr(flags, field):
            with config_origin(f"--{field}={value}"):
                cfg.set(**{field: value})
    for assignment in flags.job_set:
        config_text.set_from_text(cfg, assignment, flag="--job_set")
    arguments = [*train_arguments(flags), f"--stopped_status={cfg.stopped_status}"]
    return cfg.set(arguments=["train", *arguments])


def train_arguments(flags: launch.TrainFlags) -> list[str]:
    """Returns the flags of `moelib train` that each process of a job gets."""
    arguments = []
    for info in describe_flags(launch.TrainFlags):
        value = getattr(flags, info.name)
        if value == info.default or info.name in ("num_processes", "stopped_status"):
            continue
        values = [",".join(value)] if info.split else value if info.repeatable else [value]
        arguments += [f"--{info.name}={each}" for each in values]
    return arguments
