"""`moelib bench` runs the benchmarks of the repository, or names where they are."""

import pytest

from benchmarks import __main__ as benchmarks
from moelib.cli import bench
from moelib.core.errors import UsageError


def test_the_old_command_runs_the_benchmarks_and_names_the_new_one(capsys):
    with pytest.raises(UsageError, match="'stpe'"):
        bench.run(["stpe"])
    assert "python -m benchmarks" in capsys.readouterr().err


def test_the_old_command_has_the_flags_of_the_benchmarks(monkeypatch):
    called = []
    monkeypatch.setattr(benchmarks, "define_flags", lambda: called.append(True))
    bench.define_flags()
    assert called


def test_without_the_repository_the_command_ends_with_a_notice(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="python -m benchmarks"):
        bench.define_flags()
