"""Reports: JSON both ways, sums over kinds, rows of grouped matmuls, charts of schedules."""

import dataclasses

import numpy as np
import pytest

from moelib.cli import main
from moelib.core.errors import UserError
from moelib.kernels.gmm.tpu_tiles import Tiles
from moelib.planning.report.count import against_model
from moelib.planning.report.figures import SECTIONS
from moelib.planning.report.schedules import schedule_timelines, schedules_table
from moelib.planning.report.step_report import Collective, Kernel, Source, StepReport
from tests.kernels.gmm.cases import rows_computed_over_routed

_NUMBERS = [figure.key for section in SECTIONS for figure in section]
_KERNEL = Kernel("gmm", 1, 2, 3, 4, 0, 4096, 8, 64)


def make_report(numbers=None, **changes):
    report = StepReport(
        name="x",
        topology="v6e:2x2x1",
        mesh={"expert": 2, "fsdp": 2},
        numbers=dict.fromkeys(_NUMBERS, 1) | {"cycles": 7} | (numbers or {}),
        sources=(Source("a", 7, 1),),
        collectives=(Collective("all-gather", ("fsdp",), 2, 3, 1, 0, 0, 9, 1000),),
        kernels=(_KERNEL,),
    )
    return dataclasses.replace(report, **changes)


def test_json_gives_back_the_same_report():
    report = make_report(loops_of_unknown_length=("while.1",))
    assert StepReport.from_json(report.to_json()) == report


def test_fields_that_a_report_has_not_are_refused():
    with pytest.raises(TypeError, match="transfers"):
        StepReport.from_json(make_report().to_json().replace('"collectives"', '"transfers"'))


def _against_model(*kernels, model_flops=0, rows_routed=None):
    numbers = {"matmul_flops": 8, "kernel_flops": sum(kernel.flops for kernel in kernels)}
    return against_model(numbers, kernels, model_flops, rows_routed)


def test_rows_computed_are_the_mean_over_first_rows_of_groups():
    """Sizes of 256 up to a block's difference put the boundaries at every row of a block."""
    rng = np.random.default_rng(0)
    tiles = Tiles(128, 2048, 2048, sub_m=64)
    ratios = []
    for _ in range(2000):
        inner = np.arange(1, 8) * 256 + rng.integers(-32, 32, 7)
        sizes = np.diff([0, *inner, 2048]).tolist()
        ratios.append(rows_computed_over_routed(sizes, 4096, tiles))
    ours = _against_model(_KERNEL, rows_routed=2048)["rows_computed_over_routed"]
    assert ours == pytest.approx(np.mean(ratios), rel=0.01)
    assert ours == (2048 + 7 * 63) / 2048


def test_sums_of_rows_are_not_rows_that_experts_compute():
    summing = Kernel("gmm", 2, 2, 1, 1, rows=4096, groups=64, rows_at_once=64, kind="row sum")
    alone, both = (_against_model(*x, rows_routed=2048) for x in ([_KERNEL], [_KERNEL, summing]))
    assert both == alone
    assert _against_model() == {}


def test_flops_executed_are_set_against_the_models():
    found = _against_model(_KERNEL, model_flops=4)
    assert found["executed_over_model_flops"] == (8 + 3) / 4


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
