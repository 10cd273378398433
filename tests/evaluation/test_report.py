"""The table of results."""

from moelib.evaluation.evaluations import Metric
from moelib.evaluation.report import results_of, results_table


def test_the_table_has_a_row_for_each_task_and_step():
    found = {"piqa": {"acc": Metric(0.5, 0.1)}, "text": {"bits_per_byte": Metric(1.25)}}
    table = results_table("a run", results_of(100, 6400, found) + results_of(200, 12800, found))
    assert (table.title, table.columns) == ("a run", ("task", "step>", "acc>", "bits_per_byte>"))
    assert table.rows == [
        ["piqa", "100", "0.5000 ± 0.1000", ""],
        ["", "200", "0.5000 ± 0.1000", ""],
        [],
        ["text", "100", "", "1.2500"],
        ["", "200", "", "1.2500"],
    ]
