"""Code that a model wrote, run in a process with limits, for rewards such as unit tests.

The limits end code that loops, fills memory or writes large files. They are no sandbox against an
attack: the code runs as the present user, and can read what that user can. Run such trainings in a
container without secrets.
"""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from typing import NamedTuple

from moelib.core.errors import UserError
from moelib.tasks import limited_code

_FILE_SIZE = 1 << 20  # Bytes of a file that the code may write, and of what it prints.
_OUTPUT = 10_000  # Characters of what it prints that are kept.


class Outcome(NamedTuple):
    """Result of some code."""

    passed: bool  # Whether it ran to its last line without an error, within the limits.
    output: str  # The end of what it printed, errors included.


def run_code(
    code: str, *, allow: bool = False, seconds: float = 5.0, megabytes: int = 512
) -> Outcome:
    r"""Runs Python code in a process of its own, and returns whether it ran to its end.

    Code that exits before, such as by `sys.exit(0)`, has not passed: its tests may not have run.

    The process has an empty environment and folder, no input, and the standard library alone. Where
    the kernel allows it, it has no network.

        def passes_its_tests(prompts, completions, tests):
            return [
                float(run_code(f"{code}\n{test}", allow=True).passed)
                for code, test in zip(completions, tests, strict=True)
            ]

    Args:
        code: The code, such as that of a completion and its tests.
        allow: Whether code may be run at all.
        seconds: Limit of its processor time; its time in all may be twice that.
        megabytes: Limit of its memory.

    Raises:
        UserError: If `allow` is not set, or a limit is not positive.
    """
    if not allow:
        raise UserError(
            "allow=False: code of a model is not run unless you pass allow=True; do so in a "
            "container without secrets."
        )
    if seconds <= 0 or megabytes <= 0:
        raise UserError(f"{seconds=}, {megabytes=}: set limits above 0.")
    ended = secrets.randbelow(200) + 50  # Exit status after the last line.
    request = {"code": code, "seconds": seconds, "megabytes": megabytes, "file_size": _FILE_SIZE}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        with subprocess.Popen(
            [sys.executable, "-I", "-S", limited_code.__file__],
            cwd=folder,
            env={},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            start_new_session=True,
        ) as process:
            try:
                process.communicate(json.dumps(request | {"ended": ended}), timeout=2 * seconds)
            except subprocess.TimeoutExpired:
                pass
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # Its own processes too.
        output.seek(max(0, output.seek(0, os.SEEK_END) - _OUTPUT))
        return Outcome(process.returncode == ended, output.read().decode(errors="replace"))
