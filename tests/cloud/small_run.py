"""Runs of the small model of README in several processes, which tests kill."""

import json
import os
import pathlib
import subprocess
import sys
import time

from tests.docs import blocks


def wait_for(condition, seconds=180):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.2)
    return found


def losses(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def write_model(folder):
    """Writes the module of README that defines a small model."""
    (text,) = [each.text for each in blocks.blocks("README.md") if "def small" in each.text]
    (folder / "my_model.py").write_text(text)


FLAGS = (
    *("-m", "my_model", "-c", "small", "--num_cpu_devices=1", "--mesh=expert=2"),
    *("--set=checkpointer.save_policy.n=10", "--set=log_every_n_steps=1"),
)


def launch(folder, *flags, wait=True):
    """Starts two processes of `moelib launch` in a folder, and waits for their end."""
    command = [sys.executable, "-m", "moelib", "launch", "--num_processes=2", *FLAGS, *flags]
    env = {**os.environ, "PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=folder, env=env, **pipes)
    if not wait:
        return process
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    return out


def processes_of(text):
    """Returns the ids of the processes of a run, by their command lines."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue
        if (
            text.encode() in line
            and b"moelib\0train" in line
            and not line.startswith((b"srun", b"bash"))
        ):
            found.append(int(path.parent.name))
    return sorted(found)
