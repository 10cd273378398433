"""A trace of a model takes seconds, and many tests plan the same one."""

import pytest

from moelib.planning.estimate import sweep as sweep_lib
from moelib.planning.estimate.workload import read_workload
from tests.planning import tiny_moe


@pytest.fixture(autouse=True)
def one_trace_of_the_tiny_model(monkeypatch):
    """Makes sweeps of the tiny model share one workload."""

    def read(cfg):
        return tiny_moe.workload() if cfg == tiny_moe.config() else read_workload(cfg)

    monkeypatch.setattr(sweep_lib, "read_workload", read)
