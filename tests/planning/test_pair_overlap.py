"""Transfers of one pass of a pair under matmuls of the other, in compiled steps."""

import pytest

from benchmarks.pipelines import matmuls_under_exchanges, step
from moelib.parallel.pipeline.schedule import Schedule
from moelib.planning.compiled.in_subprocess import CompileOptions, compile_in_subprocess


@pytest.mark.slow
def test_a_pass_of_a_pair_computes_under_the_transfers_of_the_other(tmp_path):
    pytest.importorskip("libtpu")
    options = CompileOptions(dump_dir=str(tmp_path))
    outcome = compile_in_subprocess(step(Schedule.DUALPIPE_V), "v6e:2x2", options, name="pair")
    assert outcome.report is not None, outcome.failure
    text = (tmp_path / "hlo_optimized.txt").read_text()
    first, second = matmuls_under_exchanges(text).values()
    assert len(first) == len(second) == 3  # All are asynchronous.
    assert sum(map(bool, first)) >= 2  # Those of rows; the third is that of routing weights.
