"""Tables and charts of pipeline schedules."""

import pytest

from moelib.cli import main
from moelib.core.errors import UserError
from moelib.planning.schedules import schedule_timelines, schedules_table


def test_idle_shares_and_activations_are_tabulated():
    table = schedules_table(schedule_timelines(["1f1b:4x8", "dualpipe-v:4x8"]))
    assert table.rows[0] == ["1f1b:4x8", "27.3%", "8", "2", "0"]  # 3 (F + B) of 33.
    assert table.rows[1] == ["dualpipe-v:4x8", "11.1%", "4.5", "4.5", "4"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dualpipe:4x8", "did you mean 'dualpipe-v'"),
        ("zb-v", "ranks x micro-batches"),
        ("zb-v:4xmany", "ranks x micro-batches"),
        ("dualpipe-v:4x7", "num_microbatches=7"),
    ],
)
def test_wrong_schedules_are_named(text, message):
    with pytest.raises(UserError, match=message):
        schedule_timelines([text])


def test_the_command_draws_a_chart_per_schedule(capsys):
    assert main.run(["plan", "--schedule=1f1b:2x2,zb-v:2x4"]) == 0
    out = capsys.readouterr().out
    assert "27.3%" not in out
    assert "\n1f1b:2x2\n  0 FFF" in out
    assert "\nzb-v:2x4\n  0 FFF" in out
