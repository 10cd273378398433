"""The table of pipeline schedules."""

from benchmarks.pipelines import idle_table


def test_every_schedule_has_its_idle_shares_and_what_a_rank_keeps():
    rows = {name: cells for name, *cells in idle_table().rows}
    assert rows["1f1b"] == [*["4.5% / 4.5%"] * 3, "8", "0", "71"]  # 3 (F + B) of 67 (F + B).
    assert rows["zb-h1"][0] == "1.5% / 1.5%"  # 3 (F + I - W) of 195.
    assert len(rows) == 6
