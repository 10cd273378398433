"""Examples train on two processes as on one."""

import importlib
import json
import os
import socket
import subprocess
import sys

import pytest

pytest.importorskip("gymnasium")
pytest.importorskip("sklearn")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("maml", {"num_steps": 20}),
        ("federated_averaging", {"num_rounds": 12}),
        ("ppo", {"num_epochs": 2}),
    ],
)
def test_two_processes_agree_with_one(name, arguments, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.experiments.tasks.example_process"]
    command += [name, str(tmp_path / "two"), json.dumps(arguments), f"localhost:{port}", "2"]
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "4", "PYTHONPATH": os.getcwd()}
    processes = [
        subprocess.Popen([*command, str(i)], env=env, stdout=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    first, second = (json.loads(output.splitlines()[-1]) for output in outputs)
    assert first == second
    one = importlib.import_module(f"experiments.tasks.{name}").run(
        str(tmp_path / "one"), **arguments
    )
    if name == "ppo":  # Rounding in another order changes the actions that a policy draws.
        assert min(first["return"], one["return"]) > 50  # At random, 22.
    else:
        assert first == pytest.approx(one, rel=1e-3)
