"""A job of SLURM, submitted with sbatch, which is queued again after preemptions and failures."""

import os
import shlex
from collections.abc import Mapping, Sequence

from moelib.core.config import config_class
from moelib.core.errors import UserError

from .job import LOST, Job, check_form

_SCRIPT = "job.sbatch"
# sbatch reads a line of options up to a # outside of quotes, and refuses an unclosed quote.
_WORD = r"""[^\s"'\\#]+"""
_OPTION = r"""-([^\r\n"'\\#]|"[^\r\n"\\]*"|'[^\r\n'\\]*')+"""
_TIME = "[0-9]+(:[0-9]{2}){0,2}|[0-9]+-[0-9]+(:[0-9]{2}){0,2}|UNLIMITED"
# srun has one status for all processes, and those that it ends have 143. This runs one, and writes
# the status of the first that ended by itself. At SIGTERM, bash waits for the process.
_TASK = f"""trap : TERM; "$@"; status=$?
case $status in 0|{LOST}) ;; *) set -C; {{ echo $status >"$MOELIB_CAUSE"; }} 2>/dev/null; esac
exit $status"""


class SlurmJob(Job):
    """A batch job of SLURM, whose processes `srun` starts.

    SIGTERM arrives `stop_seconds` before the time limit, and the run saves. After that, and when a
    process was lost, the job is queued again, and the run resumes.
    """

    @config_class
    class Config(Job.Config):
        processes_per_node: int = 1  # Processes on each node, which share its GPUs.
        gpus_per_node: int | None = None  # GPUs of each node; None for nodes without.
        cpus_per_process: int | None = None  # CPU cores of each process.
        memory: str | None = None  # Memory of each node, such as 512G; 0 for all.
        partition: str | None = None  # Partition; None for the cluster's default.
        account: str | None = None  # Account that is charged.
        qos: str | None = None  # Quality of service.
        time_limit: str | None = None  # Time limit of one start, such as 24:00:00 or 2-00:00:00.
        stop_seconds: int = 120  # Seconds before the time limit at which the run saves.
        options: Sequence[str] = ()  # Further options of sbatch, such as --exclusive.
        setup: Sequence[str] = ()  # Shell commands before srun, such as `module load cuda`.

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        if cfg.processes_per_node < 1 or cfg.num_processes % cfg.processes_per_node:
            raise UserError(
                f"num_processes={cfg.num_processes} is not a multiple of "
                f"processes_per_node={cfg.processes_per_node}; set one that is."
            )
        for option in cfg.options:
            check_form("options", option, _OPTION, "one option of sbatch, such as --nice")
        check_form("time_limit", cfg.time_limit, _TIME, "MINUTES, HH:MM:SS or D-HH:MM:SS")
        for field in ("name", "partition", "account", "qos", "memory"):
            check_form(field, getattr(cfg, field), _WORD, "a text without spaces, quotes, \\ and #")
        check_form("folder", self._path("x"), r'[^\n"\\]*', 'a path without " and \\')

    def _path(self, name: str, percent: str = "%%") -> str:
        return os.path.abspath(self.path("")).replace("%", percent) + "/" + name

    def files(self) -> Mapping[str, str]:
        """Returns the batch script."""
        cfg = self.config
        options = {
            "job-name": cfg.name,
            "nodes": cfg.num_processes // cfg.processes_per_node,
            "ntasks-per-node": cfg.processes_per_node,
            "gpus-per-node": cfg.gpus_per_node,
            "cpus-per-task": cfg.cpus_per_process,
            "mem": cfg.memory,
            **{field: getattr(cfg, field) for field in ("partition", "account", "qos")},
            "time": cfg.time_limit,
            "signal": f"TERM@{cfg.stop_seconds}",
            "output": f'"{self._path("job-%j.log")}"',
            "open-mode": "append",
        }
        lines = [f"--{name}={value}" for name, value in options.items() if value is not None]
        srun = [
            *("srun", "--kill-on-bad-exit=1", "--label", "--open-mode=append"),
            f"--output={self._path('processes-%j.log')}",
            *("bash", "-c", _TASK, "bash", *self.command_of_process()),
        ]
        script = [
            "#!/bin/bash",
            *(f"#SBATCH {line}" for line in [*lines, "--requeue", *cfg.options]),
            "",
            "unset JAX_COORDINATOR_ADDRESS JAX_NUM_PROCESSES JAX_PROCESS_ID  # Of an outer job.",
            f'export MOELIB_CAUSE={shlex.quote(self._path("cause-", "%"))}"$SLURM_JOB_ID"',
            'rm -f "$MOELIB_CAUSE"',
            *(f"export {name}={shlex.quote(text)}" for name, text in cfg.env.items()),
            *cfg.setup,
            "status=0",
            f"{shlex.join(srun)} || status=$?",
            'if [ -s "$MOELIB_CAUSE" ]; then status=$(cat "$MOELIB_CAUSE"); fi',
            "# Stopped by SIGTERM, hung, or a process was lost: the run resumes.",
            f"case $status in {'|'.join(map(str, self.continued))})",
            f'    if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {cfg.max_restarts} ]; then',
            '        echo "Status $status; the job is queued again."',
            '        scontrol requeue "$SLURM_JOB_ID"',
            "    fi",
            "esac",
            "exit $status",
        ]
        return {_SCRIPT: "\n".join(script) + "\n"}

    def commands(self) -> Sequence[Sequence[str]]:
        """Returns the command that submits the batch script."""
        return [["sbatch", self.path(_SCRIPT)]]
