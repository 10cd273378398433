"""Kills of `moelib prepare` at random moments: `python -m benchmarks.kills`.

A case starts the command, kills it by SIGKILL, and leaves the folder to the next case, which starts
the command again. All bytes of a store that is finished are compared with those of one whose
command was never killed. `moelib drill` kills processes of runs.
"""

import dataclasses
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from moelib.runtime.command_line import flag, no_arguments, run_command
from moelib.runtime.table import Table, print_table

_MOST_SECONDS = 12.0  # From the start of the command to the kill.
_HANG_SECONDS = 300.0


def write_corpus(path: pathlib.Path) -> None:
    """Writes 30,000 documents of random letters."""
    rng = random.Random(0)
    texts = ("".join(rng.choices("abcdefgh ", k=rng.randrange(300))) for _ in range(30_000))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def prepare_and_kill(corpus: pathlib.Path, store: pathlib.Path, seconds: float) -> float | None:
    """Makes a store, and kills the command after some seconds.

    Returns:
        The seconds until the workers of the command had ended, or None if it was not killed.

    Raises:
        RuntimeError: If workers do not end, or the command fails although it is not killed.
    """
    command = ["moelib", "prepare", f"--source={corpus}", f"--output={store}", "--train_bpe=500"]
    log_file = store.with_suffix(".log")
    with log_file.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *command, "--num_processes=2"],
            stdout=log,
            stderr=log,
            process_group=0,
        )
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        status = None
        process.kill()
        process.wait()
    begin = time.monotonic()
    while _has_workers(process.pid):
        time.sleep(0.01)
        if time.monotonic() > begin + _HANG_SECONDS:
            raise RuntimeError(f"Not all workers have ended; see {log_file}.")
    if status:
        raise RuntimeError(f"A command failed that was not killed; see {log_file}.")
    return time.monotonic() - begin if status is None else None


def _has_workers(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _files(store: pathlib.Path) -> dict[str, bytes]:
    paths = (path for path in store.rglob("*") if path.is_file())
    return {str(path.relative_to(store)): path.read_bytes() for path in paths}


def kill_repeatedly(num_cases: int, seed: int, work: pathlib.Path) -> Table:
    """Returns the numbers of kills and of compared stores.

    Raises:
        RuntimeError: If a store of a command that was killed differs from the expected one.
    """
    corpus, expected, killed = (work / x for x in ("corpus.jsonl", "expected", "killed"))
    write_corpus(corpus)
    prepare_and_kill(corpus, expected, _HANG_SECONDS)
    rng, ends, num_compared, is_last = random.Random(seed), list[float](), 0, False
    while not is_last:
        is_last = len(ends) == num_cases
        after = _HANG_SECONDS if is_last else rng.random() * _MOST_SECONDS
        if (seconds := prepare_and_kill(corpus, killed, after)) is not None:
            ends.append(seconds)
            continue
        if _files(killed) != _files(expected):
            raise RuntimeError(f"{killed} differs from the store of a command never killed.")
        shutil.rmtree(killed)
        num_compared += 1
    cells = str(len(ends)), f"{max(ends):.1f}", str(num_compared)
    return Table("kills", ("kills>", "s to end>", "compared>"), [cells])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    cases: int = flag(16, "Number of kills.", lower_bound=1)
    seed: int = flag(0, "Seed of the random moments.")


def run(flags: Flags, arguments: Sequence[str]) -> None:
    """Prints a table. The folder is kept if a case fails."""
    no_arguments(arguments, Flags)
    work = pathlib.Path(tempfile.mkdtemp(prefix="kills-"))
    print_table(kill_repeatedly(flags.cases, flags.seed, work))
    shutil.rmtree(work)


if __name__ == "__main__":
    sys.exit(run_command("benchmarks.kills", Flags, run, sys.argv[1:], __doc__ or ""))
