"""A corpus of 200 MB, prepared in every way of docs/data.md: equal stores, byte for byte."""

import functools
import gzip
import json
import os
import pathlib
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest

from moelib.data.tokens.tokenizer import train_bpe
from tests.cloud.real_slurm import output, slurm
from tests.cloud.small_run import wait_for
from tests.docs import blocks

__all__ = ["slurm"]  # A fixture.
pytestmark = pytest.mark.slow

NUM_FILES, FILE_BYTES = 8, 25_000_000
HERE = pathlib.Path(__file__).parent


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.getcwd(), "TOKENIZERS_PARALLELISM": "false"}


def _texts(seed: int) -> Iterator[str]:
    """Yields texts of Zipf's words, without end."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 11, size=20_000)
    words = ["".join(map(chr, rng.integers(97, 123, size=size))) for size in sizes]
    while True:
        numbers = rng.zipf(1.2, size=int(rng.integers(20, 3000))) % len(words)
        yield " ".join(words[number] for number in numbers.tolist())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with web/, of plain and compressed files, tokenizer.json, and a store whole/."""
    made = tmp_path_factory.mktemp("many_machines")
    (made / "web").mkdir()
    for index in range(NUM_FILES):
        lines, size = [], 0
        for text in _texts(index):
            lines.append(json.dumps({"text": text}) + "\n")
            size += len(lines[-1])
            if size > FILE_BYTES:
                break
        data, path = "".join(lines).encode(), made / f"web/{index:02d}.jsonl"
        if index % 4:
            path.write_bytes(data)
        else:
            path.with_suffix(".jsonl.gz").write_bytes(gzip.compress(data, 1))
    train_bpe([text for text, _ in zip(_texts(0), range(200), strict=False)], 2000, str(made))
    assert _prepare(made, "whole", "--num_processes=4").wait() == 0
    return made


def _prepare(folder: pathlib.Path, store: str, *flags: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "moelib", "prepare", "--source=web", f"--output={store}"]
    command += ["--tokenizer=tokenizer.json", *flags]
    return subprocess.Popen(command, cwd=folder, env=_environment())


def _check(folder: pathlib.Path, store: str) -> None:
    """Raises AssertionError unless a store is that of one command with four processes."""
    names = {x.name for x in (folder / "whole").iterdir()}
    assert {x.name for x in (folder / store).iterdir()} == names
    for name in names:
        assert (folder / store / name).read_bytes() == (folder / "whole" / name).read_bytes(), name
    assert not (folder / f"{store}.partial").exists()


def test_shares_at_once_in_bounded_memory(folder):
    shares = [
        _prepare(folder, "shares", f"--share={i}/4", "--num_processes=1") for i in range(1, 5)
    ]
    assert [share.wait() for share in shares] == [0] * 4
    _check(folder, "shares")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
    assert peak < 400_000_000  # Of the largest process: documents are read a few at a time.


def test_shares_that_are_killed_at_random_and_started_again(folder):
    chance, results = random.Random(0), folder / "killed.partial/parts"
    shares: dict[int, subprocess.Popen[bytes]] = {}
    for number in range(1, 9):
        for i in range(1, 5):
            if i not in shares or shares[i].poll() is not None:
                shares[i] = _prepare(folder, "killed", f"--share={i}/4", "--num_processes=1")
        wait_for(functools.partial(_has_parts, results, 5 * number), seconds=1800)
        time.sleep(chance.random())
        killed = shares[chance.randint(1, 4)]
        killed.kill()
        killed.wait()
    for share in shares.values():
        share.wait()
    shares = {i: _prepare(folder, "killed", f"--share={i}/4") for i in range(1, 5)}
    assert [share.wait() for share in shares.values()] == [0] * 4
    _check(folder, "killed")


def _has_parts(results: pathlib.Path, number: int) -> bool:
    return len([*results.glob("*.json")]) >= number


def test_a_job_array_of_slurm(slurm, folder):
    (script,) = [x.text for x in blocks.blocks("docs/data.md") if x.title == "prepare.sbatch"]
    script = script.replace("--cpus-per-task=16", "--cpus-per-task=1")
    script = script.replace("moelib prepare", f"{sys.executable} -m moelib prepare")
    (folder / "prepare.sbatch").write_text(script)
    (folder / "data").mkdir(exist_ok=True)
    command = ["sbatch", "--parsable", f"--chdir={folder}", str(folder / "prepare.sbatch")]
    asked = subprocess.run(command, capture_output=True, text=True, check=True, env=_environment())
    job = asked.stdout.strip()
    wait_for(lambda: not output("squeue", "-h", "-j", job), seconds=1800)
    logs = [path.read_text() for path in folder.glob(f"prepare-{job}-*.log")]
    assert len(logs) == 8
    assert (folder / "data/web").exists(), logs
    (folder / "data/web").rename(folder / "slurm")
    _check(folder, "slurm")


def test_tasks_of_ray(folder):
    """Needs MOELIB_DATA_PYTHON, a Python that has Ray and what moelib requires."""
    if not (python := os.environ.get("MOELIB_DATA_PYTHON")):
        pytest.skip("set MOELIB_DATA_PYTHON to a Python with ray")
    script = HERE.parents[1] / "docs/prepare_with_ray.py"
    environment = {**_environment(), "RAY_worker_niceness": "0"}  # Instead of the lowest.
    subprocess.run([python, script], cwd=folder, env=environment, check=True)
    (folder / "data/web").rename(folder / "ray")
    _check(folder, "ray")
