"""Metrics of a step; throughput: rates, and the time spent on each kind of work."""

import math
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import moelib
from moelib.core.jaxpr import abstract_parameters, forward_pass, walk
from moelib.core.metrics import weighted
from moelib.train import metrics, throughput
from moelib.train.throughput import Throughput
from tests import tiny


def devices(kind="NVIDIA H200", num=2, peak_bytes=3e9):
    stats = lambda: {"peak_bytes_in_use": peak_bytes}
    return [SimpleNamespace(device_kind=kind, process_index=0, memory_stats=stats)] * num


@pytest.mark.parametrize(
    ("stored", "train_dtype", "expected"),
    [(None, None, "float32"), ("bfloat16", None, "bfloat16"), (None, "bfloat16", "bfloat16")],
)
def test_the_mfu_is_of_the_dtype_of_most_matmuls(
    stored, train_dtype, expected, tmp_path, monkeypatch
):
    asked = []
    known = lambda kind, dtype: asked.append(dtype)
    monkeypatch.setattr(throughput, "peak_flops_per_second", known)
    cfg = tiny.trainer_config(tmp_path, max_step=1, evaler=False)
    cfg.train_dtype, cfg.model.dtype = train_dtype, stored
    moelib.fit(cfg)
    assert asked == [expected]
    model = cfg.model.clone(name="model").instantiate(parent=None)
    params = abstract_parameters(model.create_parameter_specs_recursively(), train_dtype)
    ids = jax.ShapeDtypeStruct((2, 8), "int32")
    batch = {"input_ids": ids, "target_labels": ids}
    dots = [
        eqn.invars[0].aval.dtype
        for eqn, _ in walk(jax.make_jaxpr(forward_pass(model))(params, batch))
        if eqn.primitive.name == "dot_general"
    ]
    assert dots.count(expected) > len(dots) / 2


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


def test_pack_and_unpack():
    packed = metrics.pack({"b": jnp.array([1.0, 2.0]), "a": 3, "c/d": jnp.array([[4.0]])})
    assert packed.vector.shape == (4,)
    assert metrics.unpack(packed) == {"a": 3.0, "b/0": 1.0, "b/1": 2.0, "c/d/0": 4.0}


def test_plain_scalars_have_the_given_weight():
    assert metrics.as_metric(2.0) == weighted(2.0, 1.0)
    assert metrics.as_metric(2.0, 5.0) == weighted(2.0, 5.0)
    assert metrics.as_metric(jnp.ones(3), 2.0).weight.tolist() == [2.0, 2.0, 2.0]


def test_perplexity_and_bits_per_byte_are_without_z_loss():
    scalars = {"loss": 3.5, "cross_entropy": 2.0, "bytes_per_token": 4.0}
    found = metrics.language_metrics(scalars)
    assert found["perplexity"] == pytest.approx(math.exp(2.0))
    assert found["bits_per_byte"] == pytest.approx(2.0 / math.log(2) / 4.0)


def test_without_bytes_there_are_no_bits_per_byte():
    assert metrics.language_metrics({"loss": 0.0, "bytes_per_token": 0.0}) == {"perplexity": 1.0}
    assert math.isnan(metrics.language_metrics({"loss": math.nan})["perplexity"])
