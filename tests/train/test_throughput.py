"""Throughput: rates, and the time spent on each kind of work."""

import time
from types import SimpleNamespace

import pytest

from moelib.train.throughput import Throughput


def devices(kind="NVIDIA H200", num=2, peak_bytes=3e9):
    stats = lambda: {"peak_bytes_in_use": peak_bytes}
    return [SimpleNamespace(device_kind=kind, process_index=0, memory_stats=stats)] * num


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


def test_rates(clock):
    throughput = Throughput(1e9, devices())
    for _ in range(4):
        throughput.step_done(900, 1000)
    clock.now += 10
    throughput.add("input", 1.0)
    throughput.add("checkpoint", 2.0)
    report = throughput.report()
    assert report["tokens_per_second"] == 4 * 900 / 8
    assert report["step_seconds"] == 2.0
    tflops = 1e9 * 4 * 1000 / 8 / 2 / 1e12  # Padding is computed too.
    assert report["tflops_per_second"] == pytest.approx(tflops)
    assert report["mfu"] == pytest.approx(tflops / 989.4)
    assert report["time/input"] == pytest.approx(0.1)
    assert report["time/step"] == pytest.approx(0.7)
    assert report["device_memory_gb"] == 3.0
    assert throughput.overall()["tokens_per_second"] == 4 * 900 / 8


def test_unknown_rates_are_missing(clock):
    del clock
    cpu = [SimpleNamespace(device_kind="cpu", process_index=0, memory_stats=lambda: None)]
    report = Throughput(None, cpu).report()
    assert not {"mfu", "tflops_per_second", "device_memory_gb"} & report.keys()
    assert "mfu" not in Throughput(1.0, cpu).report()


def test_time_is_counted_for_its_part(clock):
    throughput = Throughput(None, devices())
    with throughput.spent_on("evaluation"):
        clock.now += 3
    clock.now += 1
    assert throughput.report()["time/evaluation"] == pytest.approx(0.75)
