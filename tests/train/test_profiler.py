"""Traces of the profiler: their steps and their folder."""

import pytest

from moelib.train.profiler import ProfilerWindow
from tests import tiny


def test_window_of_steps(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr("jax.profiler.start_trace", calls.append)
    monkeypatch.setattr("jax.profiler.stop_trace", lambda: calls.append("stop"))
    window = ProfilerWindow(str(tmp_path), [2, 6], num_steps=2, max_step=9)
    traced = []
    for step in range(1, 9):
        window.before_step(step)
        if len(calls) % 2:
            traced.append(step)
        if window.ends_after(step):
            window.stop()
    window.stop()
    assert traced == [2, 3, 6, 7]
    assert calls == [str(tmp_path / "profile"), "stop"] * 2


def test_invalid_settings_are_refused(tmp_path):
    with pytest.raises(ValueError, match="start at 1"):
        ProfilerWindow(str(tmp_path), [0], max_step=9)
    with pytest.raises(ValueError, match=r"4.*5 overlap"):
        ProfilerWindow(str(tmp_path), [5, 4], max_step=9)


@pytest.mark.slow
def test_traces_after_the_last_step_are_reported(tmp_path, caplog):
    ProfilerWindow(str(tmp_path), [3, 9, 20], max_step=9)
    assert "[20]" in caplog.text
    assert "max_step is 9" in caplog.text


def test_run_leaves_a_trace(tmp_path):
    cfg = tiny.trainer_config(tmp_path, max_step=4, evaler=False)
    cfg.set(start_trace_steps=[2], num_trace_steps=1).instantiate(parent=None).run()
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
