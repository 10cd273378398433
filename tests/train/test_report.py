"""Metrics as text: lines, the final table, and the health of experts."""

import jax.numpy as jnp

from moelib.layers.moe.metrics import routing_metrics
from moelib.layers.moe.router import Routing
from moelib.train import report
from tests import tiny


def test_a_run_shows_its_results_and_the_files_that_it_wrote(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # So that paths are short.
    cfg = tiny.trainer_config("run", max_step=2).set(start_trace_steps=(2,))
    out = cfg.instantiate(parent=None).run()
    title, *lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    shown = dict(line.strip().split("   ", 1) for line in lines if "   " in line.strip())
    shown = {name: text.strip() for name, text in shown.items()}
    assert title.strip() == "run"
    assert shown["val"].startswith(f"loss {out['evaler_summaries']['val']['loss']:.4f}  perplexity")
    expected = {
        "steps": "2 of 2",
        "loss": f"{out['loss']:.4f}",
        "config": "run/config.txt",
        "metrics": "run/metrics.jsonl",
        "TensorBoard": "run/summaries",
        "checkpoint": "step 2 in run/checkpoints",
        "traces": "run/profile",
    }
    assert {name: shown[name] for name in expected} == expected
    assert shown.keys() >= {"tokens/s", "TFLOP/s per device", "wall"}


def test_only_files_that_were_written_are_listed(tmp_path, capsys):
    cfg = tiny.trainer_config(tmp_path, max_step=1, evaler=False).set(checkpointer=None)
    cfg.summary_writer.formats = ()
    cfg.instantiate(parent=None).run()
    out = capsys.readouterr().out
    assert f"{tmp_path}/config.txt" in out
    assert not any(name in out for name in ("metrics", "TensorBoard", "checkpoint ", "traces"))


def test_a_resumed_run_without_a_step_shows_neither_loss_nor_rates(tmp_path, capsys):
    cfg = tiny.trainer_config(tmp_path, max_step=1, evaler=False)
    cfg.instantiate(parent=None).run()
    capsys.readouterr()
    cfg.instantiate(parent=None).run()
    out = capsys.readouterr().out
    assert "1 of 1, from 1" in out
    assert not any(name in out for name in ("loss", "tokens/s", "TFLOP/s"))


def test_rates_and_the_split_of_the_time():
    scalars = {"tokens_per_second": 9e4, "tflops_per_second": 100.0, "mfu": 0.101}
    assert dict(report.rates(scalars | {"device_memory_gb": 3, "step_seconds": 1})) == {
        "tokens/s": "90,000",
        "TFLOP/s per device": "100",
        "MFU": "10.1%",
        "device memory": "3.00 GB at most",
    }
    seconds = {"input": 2.0, "step": 8.0, "checkpoint": 61.0, "evaluation": 0.04}
    expected = "1 min 40 s (input 2.0 s, step 8.0 s, checkpoint 1 min 01 s)"
    assert report.wall_time(100, seconds) == expected
    assert report.wall_time(100, {}) == "1 min 40 s"


def test_progress_text_shows_a_cross_entropy_that_differs_from_the_loss():
    scalars = {"loss": 2.5, "cross_entropy": 2.5, "learning_rate": 1e-3, "mfu": 0.456}
    assert report.progress_text(scalars) == "loss 2.5000  lr 1.00e-03  MFU 45.6%"
    scalars["cross_entropy"] = 2.25
    text = report.progress_text(scalars, num_steps=10)
    assert text == "loss 2.5000  (mean of 10 steps)  ce 2.2500  lr 1.00e-03  MFU 45.6%"
    assert report.progress_text({"loss": 1.0, "skipped_steps": 0.0}) == "loss 1.0000"
    assert report.progress_text({"loss": 1.0, "skipped_steps": 2.0}).endswith("2 steps skipped")


def test_evaluation_without_bytes_has_no_bits_per_byte():
    scalars = {"loss": 1.0, "perplexity": 2.718}
    assert report.evaluation_text(scalars) == "loss 1.0000  perplexity 2.72"
    assert report.evaluation_text(scalars | {"bits_per_byte": 0.5}).endswith("bits/byte 0.5000")


def test_health_of_experts_over_layers():
    scalars = {
        "decoder/layer0/moe/load_max_over_mean": 1.5,
        "decoder/layers/moe/load_max_over_mean/0": 2.5,
        "entropy": 5.0,  # Of a task.
        "decoder/layers/moe/entropy/0": 1.0,
        "decoder/layers/moe/entropy/1": 3.0,
        "loss": 1.0,
    }
    shown = dict(report.expert_health(scalars))
    assert shown["busiest expert / mean load"] == "2.00 (worst layer 2.50)"
    assert shown["router entropy, nats"] == "2.000 (worst layer 1.000)"


def test_health_covers_every_metric_of_a_layer():
    probs = jnp.full((1, 4, 2), 0.5)
    routing = Routing(
        expert_ids=jnp.zeros((1, 4, 1), jnp.int32),
        weights=jnp.ones((1, 4, 1)),
        probs=probs,
        logits=jnp.zeros_like(probs),
        mask=jnp.ones((1, 4), bool),
    )
    known = (routing_metrics(routing, jnp.float32(0)).keys() - {"expert_counts"}) | {
        "bias_range"
    }  # Of moelib.layers.moe.balance.
    assert {suffix for suffix, _, _ in report.EXPERT_HEALTH} == known
