"""Processes on this machine, which share its GPUs, or simulate the hosts of a cluster."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import IO

from moelib.core.config import config_class
from moelib.runtime.cluster import visible_gpus_of_process

from .job import LOST, Job

_POLL_SECONDS = 0.05
# Runs a command, to which Linux sends SIGTERM when the process that started it has ended.
_END_WITH_PARENT = (
    *(sys.executable, "-S", "-c"),
    "import ctypes, os, sys; sys.platform == 'linux' and ctypes.CDLL(None).prctl(1, 15)\n\
os.execvp(sys.argv[1], sys.argv[1:])",
)


class LocalJob(Job):
    """Processes on this machine, each with a log of its own; process 0 also prints.

    When one is lost, the others end, and all start again.
    """

    is_stopped = False  # Whether SIGTERM or SIGINT ended the job.

    @config_class
    class Config(Job.Config):
        # Seconds that processes have to end after one has ended with an error, or after SIGTERM.
        grace_seconds: float = 120.0
        echo: bool = True  # Whether to print the output of process 0, and restarts.

    def commands(self) -> Sequence[Sequence[str]]:
        """Returns the command of each process; `env` sets its variables."""
        return [self._command(i, "localhost:PORT") for i in range(self.config.num_processes)]

    def _variables(self, index: int, address: str) -> dict[str, str]:
        cfg, number = self.config, self.config.num_processes
        if number == 1:  # Also where a launcher of several processes has started this one.
            return cfg.env | {"JAX_NUM_PROCESSES": "1"}
        job = {
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": str(number),
            "JAX_PROCESS_ID": str(index),
        }
        gpus = visible_gpus_of_process(number, index)
        return cfg.env | job | ({} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)})

    def _command(self, index: int, address: str) -> list[str]:
        variables = self._variables(index, address).items()
        return ["env", *(f"{name}={text}" for name, text in variables), *self.command_of_process()]

    def start(self) -> int:
        """Runs the processes until they end, and returns the exit status of the job.

        SIGTERM and SIGINT are passed on to the processes, which save and end; the job is then not
        started again.
        """
        cfg = self.config
        with _signals() as received:
            for restarts in range(cfg.max_restarts + 1):
                index, status = self._run_once(received)
                if not status or received or status not in self.continued:
                    break
                self._tell(
                    f"Process {index} of {cfg.num_processes} ended with status {status}; see "
                    f"{self._log(index)}."
                )
                if restarts < cfg.max_restarts:
                    self._tell(f"Restart {restarts + 1} of at most {cfg.max_restarts}.")
        self.is_stopped = bool(received)
        if received and status == cfg.stopped_status:  # The run has saved.
            return 0
        if status:
            self._tell(f"The job ended with status {status}; see {self._log(index)}.")
        return status

    def _tell(self, text: str) -> None:
        if self.config.echo:
            print(text, file=sys.stderr, flush=True)

    def _print(self, output: IO[bytes]) -> None:
        if (text := output.read()) and self.config.echo:
            sys.stdout.write(text.decode(errors="replace"))
            sys.stdout.flush()

    def _log(self, index: int) -> str:
        return self.path(f"process_{index}.log")

    def _run_once(self, received: list[int]) -> tuple[int, int]:
        """Returns (index, exit status) of the process that failed first, or (0, 0)."""
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"localhost:{free.getsockname()[1]}"
        with contextlib.ExitStack() as stack:
            processes = []
            output = stack.enter_context(open(self._log(0), "a+b"))  # At its end, before process 0.
            for index in range(self.config.num_processes):
                log = stack.enter_context(open(self._log(index), "ab"))
                process = subprocess.Popen(
                    [*_END_WITH_PARENT, *self.command_of_process()],
                    env=os.environ | self._variables(index, address),
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # The terminal's SIGINT goes to this process only.
                )
                processes.append(process)
                stack.callback(_kill, process)
            return self._wait(processes, output, received)

    def _wait(
        self, processes: list[subprocess.Popen[bytes]], output: IO[bytes], received: list[int]
    ) -> tuple[int, int]:
        failed, deadline, num_received = None, float("inf"), 0
        while running := [x for x in processes if x.poll() is None]:
            for index, process in enumerate(processes):
                if failed is None and process.returncode:
                    failed, deadline = index, time.monotonic() + self.config.grace_seconds
            if len(received) > num_received:
                if not num_received:  # Further signals do not prolong the wait.
                    deadline = time.monotonic() + self.config.grace_seconds
                num_received = len(received)
                for process in running:
                    process.send_signal(signal.SIGTERM)
            if time.monotonic() > deadline:
                for process in running:
                    process.kill()
            self._print(output)
            time.sleep(_POLL_SECONDS)
        self._print(output)
        # A process that ends because another one is lost may end before it: that one has the cause.
        # Those that ended last have not been looked at.
        if failed is None or processes[failed].returncode == LOST:
            causes = [i for i, x in enumerate(processes) if x.returncode not in (0, LOST)]
            failed = causes[0] if causes else failed or 0
        status = processes[failed].returncode
        return failed, 128 - status if status < 0 else status


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Gives a list of the signals SIGTERM and SIGINT that have arrived since."""
    received: list[int] = []
    numbers = signal.SIGTERM, signal.SIGINT
    before = [signal.signal(n, lambda number, frame: received.append(number)) for n in numbers]
    try:
        yield received
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
