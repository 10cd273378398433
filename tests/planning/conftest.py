"""A trace of a model takes seconds, and many tests plan the same one."""

import pytest

from moelib.planning.estimate import sweep as sweep_lib
from tests.planning import tiny_moe


@pytest.fixture(autouse=True, scope="package")
def one_trace_of_a_config():
    """Makes sweeps of equal configs share one workload."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep_lib, "read_workload", tiny_moe.workload_of)
        yield
