"""`moelib bench` runs the benchmarks of the repository, or names where they are."""

import pytest

from benchmarks import __main__ as benchmarks
from moelib.cli import bench
from moelib.core.errors import UsageError


def test_the_old_command_runs_the_benchmarks_and_names_the_new_one(capsys):
    assert bench.Flags is benchmarks.Flags
    with pytest.raises(UsageError, match="'stpe'"):
        bench.run(bench.Flags(), ["stpe"])
    assert "python -m benchmarks" in capsys.readouterr().err


def test_without_the_repository_the_command_names_the_new_one(monkeypatch):
    monkeypatch.setattr(bench, "_benchmarks", None)
    with pytest.raises(UsageError, match="python -m benchmarks"):
        bench.run(None, ["step"])
