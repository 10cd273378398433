"""Lines of code are told apart by the module that they are from."""

import pytest

from experiments.tasks import text_classification
from experiments.tasks.text_classification import BUCKETS, MODULES


def test_words_are_padded_and_labels_are_those_of_the_modules():
    batch = text_classification.collate(
        [
            {"text": "def add(a, b):", "module": MODULES[3]},
            {"text": "b = a.add", "module": MODULES[0]},
        ]
    )
    words = batch["words"]
    assert (words > 0).sum(1).tolist() == [4, 3]
    assert words.max() <= BUCKETS
    assert words[0, :4].tolist() == [words[0, 0], words[1, 2], words[1, 1], words[1, 0]]
    assert batch["label"] == [3, 0]


@pytest.mark.slow
def test_learns(tmp_path, monkeypatch):
    train, test = text_classification.snippets()
    monkeypatch.setattr(text_classification, "snippets", lambda: (train, test[:64]))
    assert text_classification.run(str(tmp_path), num_epochs=2)["accuracy"] > 0.2


@pytest.mark.slow
def test_score(tmp_path):
    assert text_classification.run(str(tmp_path))["accuracy"] >= 0.93
