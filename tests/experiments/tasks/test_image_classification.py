"""The classifier of digits reaches its score."""

import math

import pytest

pytest.importorskip("sklearn")

from experiments.tasks import image_classification


def test_image_classification_runs(tmp_path, monkeypatch):
    train, test = image_classification.digits()
    monkeypatch.setattr(image_classification, "digits", lambda: (train[:64], test[:8]))
    monkeypatch.setattr(image_classification, "BATCH_SIZE", 32)
    found = image_classification.run(str(tmp_path), num_epochs=1)
    assert math.isfinite(found["loss"])
    assert found["weight"] == 8


@pytest.mark.slow
def test_image_classification(tmp_path):
    assert image_classification.run(str(tmp_path))["accuracy"] >= 0.97
