"""Processes of Python, alone or several that find each other."""

import os
import socket
import subprocess
import sys


def free_port():
    """Returns a port of this machine that nothing listens on."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def start(*arguments, devices=2, **environment):
    """Starts Python with simulated devices and pipes for its output."""
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices), "PYTHONPATH": os.getcwd()}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, env=env | environment, **pipes)


def finish(*processes, code=0):
    """Returns (stdout, stderr) of each process after its end with a status, within minutes."""
    try:
        outputs = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, err) in zip(processes, outputs, strict=True):
        assert process.returncode == code, err
    return outputs
