"""Dates are rewritten in ISO format."""

import numpy as np
import pytest

from experiments.tasks import sequence_to_sequence as task


def test_tokens_are_those_of_the_text():
    batch = task.collate([{"source": "March 07, 1984", "target": "1984-03-07"}])
    assert task.words_of(batch["target"]) == ["1984-03-07"]
    assert task.words_of(batch["source"]) == ["March071984"]
    assert np.all(batch["target"][:, -1] == task.START)
    assert {x["source"] for x in task.EXAMPLES}.isdisjoint(x["source"] for x in task.TEST)


@pytest.mark.slow
def test_learns(tmp_path, monkeypatch):
    monkeypatch.setattr(task, "TEST", task.TEST[:64])  # One full batch.
    assert task.run(str(tmp_path), max_step=10)["loss"] < 2.2


@pytest.mark.slow
def test_score(tmp_path):
    assert task.run(str(tmp_path))["exact"] >= 0.95
