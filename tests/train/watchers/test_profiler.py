"""Traces of the profiler: their steps and their folder."""

import types

import pytest

from moelib.train.watchers.profiler import ProfilerWindow
from tests import tiny


def window(directory, start_steps, num_steps=3):
    """Returns the window of a trainer with these settings."""
    cfg = types.SimpleNamespace(dir=str(directory), max_step=9)
    cfg.start_trace_steps, cfg.num_trace_steps = start_steps, num_steps
    found = ProfilerWindow.default_config().instantiate()
    found.prepare(types.SimpleNamespace(config=cfg))
    return found


def test_window_of_steps(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr("jax.profiler.start_trace", calls.append)
    monkeypatch.setattr("jax.profiler.stop_trace", lambda: calls.append("stop"))
    traces = window(tmp_path, [2, 6], num_steps=2)
    traces.run = types.SimpleNamespace(step=0, wait=lambda: None)
    traces.started()
    traced = []
    for step in range(1, 9):
        if len(calls) % 2:
            traced.append(step)
        traces.between_steps(step)
    traces.ended()
    assert traced == [2, 3, 6, 7]
    assert calls == [str(tmp_path / "profile"), "stop"] * 2


def test_invalid_settings_are_refused():
    with pytest.raises(ValueError, match=r"start_trace_steps=\[0\]"):
        tiny.trainer_config("run").set(start_trace_steps=[0])
    with pytest.raises(ValueError, match=r"4.*5 overlap"):
        window("run", [5, 4])


def test_traces_on_an_object_store_are_refused():
    with pytest.raises(ValueError, match=r"start_trace_steps is \[2\].*'s3://bucket/run'"):
        window("s3://bucket/run", [2])


def test_traces_after_the_last_step_are_reported(tmp_path, caplog):
    cfg = tiny.trainer_config(tmp_path, max_step=9, evaler=False)
    cfg.set(start_trace_steps=[3, 9, 20]).instantiate(parent=None)
    assert "[20]" in caplog.text
    assert "max_step is 9" in caplog.text


def test_run_leaves_a_trace(tmp_path):
    cfg = tiny.trainer_config(tmp_path, max_step=4, evaler=False)
    cfg.set(start_trace_steps=[2], num_trace_steps=1).instantiate(parent=None).run()
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
