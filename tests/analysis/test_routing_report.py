"""Plots have the same bytes every time, and gaps where nothing is defined."""

import re

from moelib.analysis.routing_report import plot


def test_a_plot_has_the_same_bytes_every_time(tmp_path):
    layers = {"layer0": {"max_violation": [0.5, None, 0.25]}}
    files = [tmp_path / name for name in ("a.svg", "b.svg")]
    for file in files:
        plot(str(file), "load", [1, 2, 3], layers)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_many_layers_have_many_colors(tmp_path):
    layers = {f"layer{i}": {"1": [0.1 * i, 1.0]} for i in range(12)}
    plot(str(tmp_path / "a.svg"), "saturation", [1, 2], layers)
    lines = re.findall(r"stroke: (#\w+); stroke-width: 1.5", (tmp_path / "a.svg").read_text())
    assert len(set(lines)) == 12
