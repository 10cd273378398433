"""The examples of tasks reach their scores."""

import pytest

pytest.importorskip("sklearn")

from experiments.tasks import image_classification


def test_image_classification_learns(tmp_path):
    assert image_classification.run(str(tmp_path), num_epochs=1)["accuracy"] > 0.5


@pytest.mark.slow
def test_image_classification(tmp_path):
    assert image_classification.run(str(tmp_path))["accuracy"] >= 0.97
