"""An MoE run and its dense twin, with planted losses."""

import json
import pathlib

import pytest

from moelib.analysis.twins import compare_twins, twins_table, write_report
from moelib.core.errors import UserError
from moelib.operations.dense_twin import dense_twin
from tests.analysis.runs import config, write_run, write_twins


def test_losses_at_equal_flops_and_at_equal_time(tmp_path):
    moe, dense = write_twins(tmp_path)
    found = compare_twins([dense, moe])
    assert (found.moe.name, found.dense.name) == (moe, dense)
    assert found.flops_per_token_ratio == pytest.approx(1, abs=0.01)
    flops, time = found.equal_flops, found.equal_time
    assert (flops.moe_loss, flops.dense_loss) == pytest.approx((2.25, 3.0), abs=0.03)
    assert flops.gain == pytest.approx(2.0, rel=0.03)
    # After 100 s the dense run has taken all steps, and the MoE run half of them.
    assert (time.cost, time.moe_loss, time.dense_loss) == pytest.approx((100, 3.0, 3.0))
    assert time.gain == pytest.approx(1.0)
    rows = twins_table(found).rows
    assert [row[0] for row in rows] == ["equal FLOPs", "equal time"]


def test_a_report_has_numbers_a_plot_and_a_table(tmp_path):
    found = compare_twins(write_twins(tmp_path))
    data, image, page = write_report(str(tmp_path / "report"), found)
    values = json.loads(pathlib.Path(data).read_text())
    assert values["equal_time"]["gain"] == pytest.approx(1.0)
    assert values["curves"]["moe"]["losses"] == [4.0, 3.0, 2.5, 2.25]
    assert "<svg" in pathlib.Path(image).read_text()
    assert "| equal FLOPs |" in pathlib.Path(page).read_text()


def test_a_moe_run_that_is_never_as_good_has_no_gain(tmp_path):
    moe = write_run(tmp_path / "moe", config(), [4.0, 3.9])
    dense = write_twins(tmp_path / "other")[1]
    assert compare_twins([moe, dense]).equal_flops.gain is None


def test_a_moe_run_that_is_better_at_its_first_line_has_no_known_gain(tmp_path):
    moe = write_run(tmp_path / "moe", config(), [2.9, 2.8])
    dense = write_twins(tmp_path / "other")[1]
    found = compare_twins([moe, dense], step_seconds=(0.5, 0.5))
    assert found.equal_time.dense_loss == 3.0
    assert found.equal_time.gain is None


@pytest.mark.parametrize(
    ("last", "line"),
    [
        (3.0, 2),  # The MoE run first had this loss at its second line.
        (2.85, 4.5),  # Half way from the fourth line to the fifth.
    ],
)
def test_the_gain_is_that_of_the_first_time_that_the_loss_was_as_low(tmp_path, last, line):
    moe = write_run(tmp_path / "moe", config(), [4.0, 3.0, 3.5, 3.2, 2.5])
    dense = dense_twin(config(), multiple_of=1).config
    dense = write_run(tmp_path / "dense", dense, [5.0, 4.5, 4.0, 3.5, last])
    found = compare_twins([moe, dense], step_seconds=(0.5, 0.5))
    assert found.equal_time.gain == pytest.approx(5 / line)


def test_losses_that_are_not_finite_are_named_and_not_drawn(tmp_path):
    moe, dense = write_twins(tmp_path)
    bad = write_run(tmp_path / "bad", config(), [4.0, None, 3.0, 2.5])
    found = compare_twins([bad, dense])
    assert found.curves[0].losses.tolist() == [4.0, 3.0, 2.5]
    assert "losses that are not finite, from step 200" in found.notes[0]
    none = write_run(tmp_path / "none", config(), [None, 3.0])
    with pytest.raises(UserError, match="1 finite values of mean_loss"):
        compare_twins([none, dense])
    assert moe


def test_a_run_that_ends_before_the_first_loss_of_the_other_is_refused(tmp_path):
    moe = write_twins(tmp_path)[0]  # Its first loss is that of step 100.
    twin = dense_twin(config(max_step=50)).config
    short = write_run(tmp_path / "short", twin, [5.0, 4.0])
    with pytest.raises(UserError, match=r"moe: its first loss is after .* flops"):
        compare_twins([moe, short])


@pytest.mark.parametrize("kinds", ["moe moe", "dense dense"])
def test_two_runs_of_one_kind_are_no_twins(tmp_path, kinds):
    names = dict(zip(("moe", "dense"), write_twins(tmp_path), strict=True))
    both = "both have" if kinds == "moe moe" else "neither has"
    with pytest.raises(UserError, match=f"{both} experts"):
        compare_twins([names[kind] for kind in kinds.split()])
    with pytest.raises(UserError, match="1 runs"):
        compare_twins([names["moe"]])
