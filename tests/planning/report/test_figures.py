"""Figures of reports by key, and columns of other programs to compare."""

import json
import pathlib

import pytest

from moelib.core.errors import UserError
from moelib.planning.report.figures import figures_table, read_columns
from tests.planning.report.test_step_report import make_report

MAXTEXT = pathlib.Path(__file__).parents[3] / "experiments/gpt_oss_maxtext.json"


def test_a_file_of_reports_or_of_figures_becomes_columns(tmp_path):
    report = make_report()
    path = tmp_path / "plan.json"
    for values in ({"compiled": [report.to_json()]}, report.to_json()):
        path.write_text(json.dumps(values))
        assert read_columns(str(path)) == [("x", report.figures)]
    of_phases = {name: {"rows": [], "compiled": [report.to_json()]} for name in ("first", "long")}
    path.write_text(json.dumps(of_phases))
    columns = [("x, first", report.figures), ("x, long", report.figures)]
    assert read_columns(str(path)) == columns
    maxtext, aim = read_columns(str(MAXTEXT))
    assert (maxtext.name, aim.name) == ("MaxText", "aim")
    rows = {row[0]: row[1:] for row in figures_table(report, [maxtext, aim]).rows if row}
    assert rows["peak memory"] == ("0.000 GiB", "15.519 GiB", "13.500 GiB")
    assert rows["reduce-scatter"] == ("-", "1,648.0 MiB", "no more")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"memory.peek": 1}', r"'memory.peak'"),
        ('{"memory.peak": [1]}', r"'memory.peak' is \[1\]"),
        ('{"rows": [], "compiled": [], "failures": []}', "with a compiled step"),
        ("[]", "figures.json"),
        ("{", "--json"),
    ],
)
def test_other_files_are_refused(tmp_path, text, message):
    (tmp_path / "figures.json").write_text(text)
    with pytest.raises(UserError, match=message):
        read_columns(str(tmp_path / "figures.json"))
