import json

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from moelib.core.errors import UserError
from moelib.runtime.processes import OtherProcessError, agreed, gather_json, on_process_0
from tests.two_processes import run_as_two

VALUES = [[1, {"step": 3, "buffer": ""}], [0, None], [1, {"step": 3, "buffer": "aäa"}]]


def test_values_of_all_processes_are_gathered_in_their_order(monkeypatch):
    texts = [json.dumps(value).encode() for value in VALUES]
    width = max(map(len, texts))
    padded = np.stack([np.frombuffer(text.ljust(width, b"\0"), np.uint8) for text in texts])

    def process_allgather(mine):
        everyones = padded if mine.ndim else np.array([len(text) for text in texts])
        np.testing.assert_array_equal(everyones[0], mine)
        return everyones

    monkeypatch.setattr(jax, "process_count", lambda: len(VALUES))
    monkeypatch.setattr(multihost_utils, "process_allgather", process_allgather)
    assert gather_json(VALUES[0]) == VALUES


def test_one_process_gathers_its_own_value():
    assert gather_json({"a": 1}) == [{"a": 1}]


class DamagedError(UserError):
    """A kind that the caller tells apart."""


OUTCOMES = [
    ([None, None], [0, 1]),
    ([DamagedError("a"), None], [DamagedError, DamagedError]),
    ([None, DamagedError("b")], [DamagedError, DamagedError]),
    ([DamagedError("a"), OSError("b")], [OtherProcessError, OSError]),  # The worst one counts.
    ([OSError("a"), None], [OSError, OtherProcessError]),
    ([None, UserError("b")], [UserError, UserError]),
]


@pytest.mark.parametrize(("errors", "expected"), OUTCOMES)
def test_a_step_succeeds_or_fails_on_all_processes(monkeypatch, errors, expected):
    def step(index):
        if errors[index] is not None:
            raise errors[index]
        return index

    found = run_as_two(monkeypatch, lambda index: agreed(lambda: step(index), [DamagedError]))
    assert [x if isinstance(x, int) else type(x) for x in found] == expected
    for index, other in enumerate(reversed(errors)):
        if isinstance(found[index], Exception) and errors[index] is not found[index]:
            assert f"process {1 - index}" in str(found[index])
            assert str(other) in str(found[index])


def test_process_0_alone_takes_a_step_and_all_learn_its_outcome(monkeypatch):
    ran = []
    take = lambda index: on_process_0(lambda: ran.append(index) or {"step": 3})
    assert run_as_two(monkeypatch, take) == [{"step": 3}] * 2
    assert ran == [0]
    own, other = run_as_two(monkeypatch, lambda index: on_process_0(lambda: 1 / 0))
    assert isinstance(own, ZeroDivisionError)
    assert "process 0 failed, and all with it: ZeroDivisionError" in str(other)
