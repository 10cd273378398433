"""Curves: exact while there are few values, then means and extremes of equal ranges of steps."""

import json
import math

import numpy as np

from moelib.runs.curves import Curve, RunMetrics
from moelib.runs.metrics_file import MetricsReader


def test_few_values_are_points():
    curve = Curve(4)
    for step, value in ((10, 3.0), (20, 2.0), (30, 2.5)):
        curve.add(step, value)
    assert curve.points() == [(10, 3, 3, 3), (20, 2, 2, 2), (30, 2.5, 2.5, 2.5)]
    assert (curve.last, curve.least) == ((30, 2.5), (20, 2.0))


def test_buckets_have_the_mean_and_the_extremes_of_their_values():
    rng, curve = np.random.default_rng(0), Curve(16)
    values = rng.normal(size=1000)
    for step, value in enumerate(values):
        curve.add(step, float(value))
    points = np.array(curve.points())
    width = 64  # 1000 steps in at most 16 buckets of a power of two.
    assert len(points) == 16
    parts = [values[i : i + width] for i in range(0, 1000, width)]
    np.testing.assert_allclose(points[:, 1], [part.mean() for part in parts])
    np.testing.assert_array_equal(points[:, 2], [part.min() for part in parts])
    np.testing.assert_array_equal(points[:, 3], [part.max() for part in parts])


def test_values_that_are_no_finite_numbers_are_no_points():
    curve = Curve(4)
    for value in (None, math.nan, math.inf, "text", [1]):
        curve.add(1, value)
    assert curve.points() == []
    assert curve.last == (1, None)


def test_metrics_are_brought_up_to_date_in_parts_and_again_after_a_restart(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": i, "loss": float(i), "other": 0.0}) + "\n" for i in range(100)]
    path.write_text("".join(lines))
    metrics = RunMetrics(MetricsReader(tmp_path), "loss")
    parts = 1
    while not metrics.update(seconds=0):
        parts += 1
    assert parts > 2
    assert list(metrics.curves) == ["loss"]
    assert len(metrics.curves["loss"].points()) == 100
    (tmp_path / "new").write_text("".join(lines[:40]))
    (tmp_path / "new").rename(path)
    assert metrics.update()
    assert metrics.last("loss") == 39
    assert len(metrics.curves["loss"].points()) == 40
