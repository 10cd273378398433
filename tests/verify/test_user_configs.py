"""Configs with layers of a user's own pass every check, and a bug in one is named by its check."""

import math

import jax
import pytest

from moelib.parallel.mesh import parse_mesh
from moelib.verify.outcome import Status
from moelib.verify.run import verify_config
from tests.verify.user_configs import BUGS, causal_mask_is_forgotten, negatives_of_each_device

QUICK = (causal_mask_is_forgotten, negatives_of_each_device)
CASES = [
    pytest.param(bug, mesh, marks=() if bug in QUICK else pytest.mark.slow, id=bug.config.__name__)
    for bug, mesh in BUGS.items()
]


def verified(config, mesh):
    """Returns the report on one device and on a mesh."""
    report = verify_config(config(), num_devices=math.prod(parse_mesh(mesh)), meshes=mesh)
    jax.clear_caches()
    return report


@pytest.mark.parametrize(("bug", "mesh"), CASES)
def test_a_correct_config_passes_every_check(bug, mesh):
    report = verified(bug.config, mesh)
    assert report.status is Status.PASSED, report.lines()


@pytest.mark.parametrize(("bug", "mesh"), CASES)
def test_a_bug_is_named_by_the_check_that_concerns_it(bug, mesh, monkeypatch):
    jax.clear_caches()
    bug.plant(monkeypatch)
    report = verified(bug.config, mesh)
    failed = report.outcomes[-1]
    check, _, named = bug.expected.partition(": ")
    assert (failed.status, failed.check) == (Status.FAILED, check), report.lines()
    assert named in failed.detail
