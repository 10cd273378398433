"""A job: the processes of one training run, and how a cluster is asked to start them."""

import os
import posixpath
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence

from moelib.core.config import REQUIRED, Configurable, Required, config_class
from moelib.core.errors import SECRET_NAME, UserError
from moelib.runtime.lock import directory_lock
from moelib.runtime.storage import atomic_file

STOPPED = 75  # EX_TEMPFAIL of sysexits.h.
LOST = 88
# Exit statuses after which the same command continues a run, besides that of a stopped one: it
# hung, another process was lost, or this one was killed by signal 6, 7, 9, 11 or 15.
_CONTINUED = 87, LOST, 134, 135, 137, 139, 143
LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"  # A name of RFC 1123.
_VARIABLE = "[A-Za-z_][A-Za-z0-9_]*"  # Name of an environment variable.


def check_form(field: str, value: str | None, form: str, what: str) -> None:
    """Raises UserError if a value is set and does not match a regular expression.

    Args:
        field: Name of the field, for the message.
        value: Its value.
        form: Regular expression.
        what: Noun phrase of what to set instead.
    """
    if value is not None and not re.fullmatch(form, value):
        raise UserError(f"{field}={value!r}: set {what}.")


def is_below(folder: str, others: Iterable[str]) -> bool:
    """Returns whether a folder is one of some absolute paths, or below one, without `..`."""
    path = posixpath.join(folder, "")
    inside = any(path.startswith(posixpath.join(other, "")) for other in others)
    return inside and posixpath.normpath(folder) == folder.rstrip("/")


class Job(Configurable):
    """The processes of a training run.

    `moelib launch` writes `files()` into the folder of the job, and starts it by `commands()`.
    """

    # Whether the processes see the files of this machine; else the files of the job are in jobs/.
    shares_files = True

    @config_class
    class Config(Configurable.Config):
        name: str = "moelib"  # Name of the job.
        arguments: Required[Sequence[str]] = REQUIRED  # Command line of `moelib`, such as train ...
        folder: Required[str] = REQUIRED  # Folder for the files and the logs of the job.
        # Command before the arguments; by default `python -m moelib` of this environment.
        program: Sequence[str] = (sys.executable, "-m", "moelib")
        num_processes: int = 1  # Number of processes.
        env: dict[str, str] = {}  # Environment variables of the processes.
        # Number of times that the job starts again after it was stopped or has lost a process.
        max_restarts: int = 10
        stopped_status: int = STOPPED  # Exit status of a run that SIGTERM stopped.

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        if cfg.num_processes < 1:
            raise UserError(f"num_processes={cfg.num_processes}: set 1 or more.")
        if cfg.max_restarts < 0:
            raise UserError(f"max_restarts={cfg.max_restarts}: set 0 or more.")
        if not 2 < cfg.stopped_status < 256:
            raise UserError(f"stopped_status={cfg.stopped_status}: set 3 to 255, not an error's.")
        self.check_variables("env", cfg.env)
        for name in cfg.env:
            if re.fullmatch(SECRET_NAME, name, re.IGNORECASE):  # Files of the job show its value.
                raise UserError(
                    f"env has {name!r}, which is named like a secret; export it in your shell for "
                    "local and slurm, name a secret of the cluster in `secrets` for kubernetes, or "
                    "fetch it in `setup` for gcp_tpu."
                )
        # Exit statuses after which the same command continues the run.
        self.continued = sorted({cfg.stopped_status, *_CONTINUED})

    def check_variables(self, field: str, names: Iterable[str]) -> None:
        """Raises UserError if a field has a name that is none of an environment variable."""
        for name in names:
            check_form(f"{field} has {name!r}", name, _VARIABLE, "a name such as NCCL_DEBUG")

    def files(self) -> Mapping[str, str]:
        """Returns the text of each file, by its name in the folder of the job."""
        return {}

    def commands(self) -> Sequence[Sequence[str]]:
        """Returns the commands that start the job, once its files are written."""
        raise NotImplementedError

    def check_trainer_dir(self, folder: str) -> None:
        """Raises UserError if the processes cannot keep the files of a run in a folder."""

    def command_of_process(self) -> list[str]:
        """Returns the command line of each process."""
        return [*self.config.program, *self.config.arguments]

    def path(self, name: str) -> str:
        """Returns the path of a file of the job."""
        return os.path.join(self.config.folder, name)

    def describe(self) -> str:
        """Returns the files and the commands as text."""
        texts = [f"# {self.path(name)}\n{text}" for name, text in self.files().items()]
        return "\n".join([*texts, *map(shlex.join, self.commands())])

    def launch(self) -> int:
        """Writes the files, starts the job, and returns its exit status.

        Raises:
            UserError: If another one uses the folder of the job, or it cannot be written.
        """
        with directory_lock(self.config.folder, setting="--trainer_dir"):
            for name, text in self.files().items():
                with atomic_file(self.path(name)) as file:
                    file.write(text)
            return self.start()

    def start(self) -> int:
        """Runs the commands until one fails, and returns the exit status of the last one."""
        for command in self.commands():
            try:
                status = subprocess.run(command, check=False).returncode
            except FileNotFoundError:
                raise UserError(
                    f"{command[0]} is not installed on this machine; run the command where it is: "
                    f"{shlex.join(command)}"
                ) from None
            if status:
                return status
        return 0
