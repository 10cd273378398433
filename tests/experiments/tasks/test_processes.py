"""Examples of tasks train on two processes as on one."""

import json
import os
import socket
import subprocess
import sys

import pytest

pytest.importorskip("gymnasium")
pytest.importorskip("sklearn")

from experiments.tasks import federated_averaging, maml
from tests.experiments.tasks.process import SETTINGS


@pytest.mark.slow
def test_two_processes_reach_the_scores_of_one(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.experiments.tasks.process", str(tmp_path / "two")]
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "2"}
    env["PYTHONPATH"] = os.pathsep.join([os.getcwd(), env.get("PYTHONPATH", "")])
    runs = [
        subprocess.Popen(
            [*command, f"localhost:{port}", "2", str(i)], env=env, stdout=subprocess.PIPE, text=True
        )
        for i in range(2)
    ]
    results = [json.loads(run.communicate(timeout=600)[0].splitlines()[-1]) for run in runs]
    assert results[0] == results[1]
    assert (results[0]["processes"], results[0]["devices"]) == (2, 4)
    for example in (maml, federated_averaging):
        name = example.__name__.rpartition(".")[2]
        one = example.run(str(tmp_path / name), **SETTINGS[name])
        assert results[0][name] == pytest.approx(one, rel=1e-2), name
    assert results[0]["ppo"]["return"] > 50  # Rounding may change an action, and all that follow.
