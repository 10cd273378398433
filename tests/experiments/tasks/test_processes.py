"""Examples train on two processes as on one."""

import importlib
import json

import pytest

from tests.python_process import finish, free_port, start

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
    command = "-m", "tests.experiments.tasks.example_process", name, tmp_path / "two"
    command = *command, json.dumps(arguments), f"localhost:{free_port()}", 2
    outputs = finish(*(start(*command, i, devices=4) for i in range(2)))
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in outputs)
    assert first == second
    one = importlib.import_module(f"experiments.tasks.{name}").run(
        str(tmp_path / "one"), **arguments
    )
    if name == "ppo":  # Rounding in another order changes the actions that a policy draws.
        assert min(first["return"], one["return"]) > 50  # At random, 22.
    else:
        assert first == pytest.approx(one, rel=1e-3)
