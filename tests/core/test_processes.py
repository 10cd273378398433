import json

import jax
import numpy as np
from jax.experimental import multihost_utils

from moelib.core.processes import gather_json

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
