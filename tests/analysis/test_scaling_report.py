"""The report of scaling laws."""

import dataclasses
import json
import math
import pathlib

import pytest

from moelib.analysis.scaling_laws import analyze
from moelib.analysis.scaling_report import tables, write_report
from tests.analysis.test_scaling_laws import planted


@pytest.fixture(scope="module")
def analysis():
    runs = planted()
    bad = dataclasses.replace(runs[0], name="bad", loss=math.nan)
    return analyze([*runs, bad], [1e20], num_bootstraps=3)


def test_a_report_has_numbers_a_plot_and_tables(tmp_path, analysis):
    data, image, page = write_report(str(tmp_path / "new/report"), analysis, metric="mean_loss")
    values = json.loads(pathlib.Path(data).read_text())
    fit = values["fits"]["without embeddings"]
    assert fit["isoflop"]["law"]["exponent"] == pytest.approx(0.45, abs=0.05)
    assert fit["parametric"]["alpha"] == pytest.approx(0.34, abs=0.05)
    assert values["excluded"] == {"bad": "its last loss is nan, which has no finite logarithm"}
    picture = pathlib.Path(image).read_text()
    assert picture.count("<svg") == 1
    text = pathlib.Path(page).read_text()
    for heading in ("Laws", "Minima of the budgets", "The best model for a budget"):
        assert f"## {heading}\n" in text
    assert "| bad | its last loss is nan, which" in text


def test_both_ways_of_counting_stand_side_by_side(analysis):
    laws, minima, predictions, _ = tables(analysis)
    assert laws.columns == ["", "N with embeddings>", "N without embeddings>"]
    assert laws.rows[0][0] == "N_opt ~ C^a, IsoFLOP"
    assert len(minima.rows) == 8
    assert [row[3] for row in predictions.rows] == ["parametric", "IsoFLOP"] * 2


def test_methods_that_disagree_are_named(analysis):
    name = "without embeddings"
    fit = dataclasses.replace(
        analysis.fits[name], intervals={**analysis.fits[name].intervals, "a": (0.9, 0.95)}
    )
    fit = dataclasses.replace(fit, isoflop=dataclasses.replace(fit.isoflop, without_minimum=0.25))
    other = dataclasses.replace(analysis, fits={name: fit})
    notes = tables(other)[0].footnotes
    assert any("25% of the bootstraps have no minimum" in note for note in notes)
    assert any("the two methods disagree on a" in note for note in notes)
