"""Handwritten digits are described in letters."""

import numpy as np
import pytest

pytest.importorskip("sklearn")

from experiments.tasks import captioning as task


def test_captions_are_read_from_their_letters():
    image = np.full((8, 8), 0.5)
    examples = task.captioned([{"image": image * i, "label": 7 - 4 * i} for i in (0, 1)])
    assert [x["target"] for x in examples] == ["thin seven", "bold three"]
    assert task.texts_of(task.collate(examples)["target"]) == ["thin seven", "bold three"]
    found = task.scores(examples, ["thin seven", "thin three"])
    assert found == {"exact": 0.5, "named": 1.0}


@pytest.mark.slow
def test_learns(tmp_path, monkeypatch):
    train, test = task.digits()
    monkeypatch.setattr(task, "digits", lambda: (train, test[:64]))  # One full batch.
    assert task.run(str(tmp_path), max_step=10)["loss"] < 2.2


@pytest.mark.slow
def test_score(tmp_path):
    found = task.run(str(tmp_path))
    assert found["exact"] >= 0.8
    assert found["named"] >= 0.9
