"""What a run says: lines, lengths of time, and the health of experts."""

import jax.numpy as jnp
import pytest

from moelib.layers.moe.metrics import routing_metrics
from moelib.layers.moe.router import Routing
from moelib.train import progress


def test_plain_lines(capsys):
    with progress.ProgressLine(100, active=True) as line:
        line.step(10, {"loss": 2.5, "cross_entropy": 2.5, "learning_rate": 1e-3, "mfu": 0.456})
        line.say("saved")
    assert capsys.readouterr().err == "step 10/100  loss 2.5000  lr 1.00e-03  MFU 45.6%\nsaved\n"


def test_silence_of_other_processes(capsys):
    with progress.ProgressLine(100, active=False) as line:
        line.step(10, {"loss": 2.5})
    assert capsys.readouterr().err == ""


def test_live_line_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with progress.ProgressLine(100) as line:
        line.step(10, {"loss": 2.5, "cross_entropy": 2.25})
        line.say("saved [1]")
    err = capsys.readouterr().err
    assert "loss 2.5000  ce 2.2500" in err
    assert "saved [1]" in err


@pytest.mark.parametrize(
    ("seconds", "text"), [(4.06, "4.1 s"), (185, "3 min 05 s"), (3725, "1 h 02 min")]
)
def test_lengths_of_time(seconds, text):
    assert progress.seconds_text(seconds) == text


def test_health_of_experts_over_layers():
    scalars = {
        "decoder/layer0/moe/load_max_over_mean": 1.5,
        "decoder/layers/moe/load_max_over_mean/0": 2.5,
        "decoder/layers/moe/entropy/0": 1.0,
        "decoder/layers/moe/entropy/1": 3.0,
        "loss": 1.0,
    }
    assert progress.expert_health(scalars) == [
        ("busiest expert / mean load", "2.00 (worst layer 2.50)"),
        ("router entropy, nats", "2.000 (worst layer 1.000)"),
    ]


def test_health_is_of_metrics_that_layers_have():
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
    assert {end for end, _, _ in progress._EXPERT_HEALTH} == known


def test_table_says_everything(capsys):
    progress.print_summary("run: 5 of 5", [("loss", "1.0")], [("experts", "fine")])
    out = capsys.readouterr().out
    assert all(text in out for text in ("run: 5 of 5", "loss", "1.0", "experts", "fine"))
