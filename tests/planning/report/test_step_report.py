"""Reports: JSON both ways, and rows of grouped matmuls."""

import dataclasses

import numpy as np
import pytest

from moelib.kernels.gmm.tpu_tiles import Tiles
from moelib.planning.report.count import rows_computed_over_routed
from moelib.planning.report.step_report import Collective, Finding, Kernel, StepReport
from tests.kernels.gmm.cases import rows_computed_over_routed as rows_of_tiles

GMM = Kernel("gmm", 1, 2, 3, 4, 0, 4096, 8, 64)
FINDING = Finding(
    "padding", "hint", "fusion.1 f32[2048,4]", "model.decoder", "join dimensions",
    bytes=2**20, executions=8, op_name="jit(s)/mul", locations=["layers/norm.py:35"], count=3,
)  # fmt: skip


def make_report(figures=None, **changes):
    names = (
        "peak",
        "arguments",
        "parameters",
        "learner",
        "outputs",
        "temporaries",
        "aliased",
        "code",
    )
    known = {f"memory.{name}": i for i, name in enumerate(names, 1)} | {"cycles": 7}
    report = StepReport(
        name="x",
        topology="v6e:2x2x1",
        mesh={"expert": 2, "fsdp": 2},
        figures=known | (figures or {}),
        collectives=[Collective("all-gather", ["fsdp"], 2, 3, 1, 0, 0, 9, 1000)],
        kernels=[GMM],
    )
    return dataclasses.replace(report, **changes)


def test_json_gives_back_the_same_report():
    stages = [{"name": "jaxpr", "lines": 3}]
    report = make_report(loops_of_unknown_length=["while.1"], findings=[FINDING], stages=stages)
    again = StepReport.from_json(report.to_json())
    assert again.findings == report.findings
    assert again.to_json() == report.to_json()


def test_rows_computed_are_the_mean_over_first_rows_of_groups():
    """Sizes of 256 up to a block's difference put the boundaries at every row of a block."""
    rng = np.random.default_rng(0)
    tiles = Tiles(128, 2048, 2048, sub_m=64)
    ratios = []
    for _ in range(2000):
        inner = np.arange(1, 8) * 256 + rng.integers(-32, 32, 7)
        sizes = np.diff([0, *inner, 2048]).tolist()
        ratios.append(rows_of_tiles(sizes, 4096, tiles))
    ours = rows_computed_over_routed([GMM], 2048)
    assert ours == pytest.approx(np.mean(ratios), rel=0.01)
    assert ours == (2048 + 7 * 63) / 2048


def test_sums_of_rows_are_not_rows_that_experts_compute():
    summing = Kernel("gmm", 2, 2, 1, 1, rows=4096, groups=64, rows_at_once=64, kind="row sum")
    assert rows_computed_over_routed([GMM, summing], 2048) == rows_computed_over_routed([GMM], 2048)
    assert rows_computed_over_routed([], 2048) is None
