"""Results: the files, the table and the plot hold what was found."""

import csv
import json

from moelib.evaluation.evaluations import Metric
from moelib.evaluation.report import results_of, results_table, write_results

FOUND = {"piqa": {"acc": Metric(0.5, 0.1)}, "text": {"bits_per_byte": Metric(1.25)}}
RESULTS = results_of(100, 6400, FOUND) + results_of(200, 12800, FOUND)


def test_files_hold_every_number(tmp_path):
    write_results(str(tmp_path / "out"), "a run", RESULTS, {"max_length": 64})
    tmp_path /= "out"
    picture = (tmp_path / "results.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["max_length"] == 64
    assert content["results"] == [result._asdict() for result in RESULTS]
    with open(tmp_path / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[0] == {
        "step": "100", "tokens": "6400", "task": "piqa", "metric": "acc",
        "value": "0.5", "stderr": "0.1",
    }  # fmt: skip
    assert rows[3]["value"] == "1.25"
    assert rows[3]["stderr"] == ""


def test_the_table_has_a_row_for_each_task_and_step():
    table = results_table("a run", RESULTS)
    assert (table.title, table.columns) == ("a run", ("task", "step>", "acc>", "bits_per_byte>"))
    assert table.rows == [
        ["piqa", "100", "0.5000 ± 0.1000", ""],
        ["", "200", "0.5000 ± 0.1000", ""],
        [],
        ["text", "100", "", "1.2500"],
        ["", "200", "", "1.2500"],
    ]
