"""The table at the end of a run says how far it came, how fast, and what it wrote where."""

import types

import numpy as np
import pytest

from moelib.train import progress
from moelib.train.report import report_run
from moelib.train.throughput import Throughput
from tests import tiny

H200 = types.SimpleNamespace(
    device_kind="NVIDIA H200", process_index=0, memory_stats=lambda: {"peak_bytes_in_use": 3e9}
)


@pytest.fixture
def report(monkeypatch):
    """Returns the title of a loop's report and its rows, as they are given to be printed."""
    printed = []
    monkeypatch.setattr(progress, "print_summary", lambda *args: printed.append(args))

    def report(loop, wall_seconds=100.0):
        report_run(loop, wall_seconds=wall_seconds)
        title, rows, health = printed.pop()
        return title, dict([*rows, *health])

    return report


def make_loop(directory, cfg=None, **fields):
    """Returns what a report reads of a loop: of a trainer that took 5 of 8 steps."""
    cfg = tiny.trainer_config(directory, evaler=False) if cfg is None else cfg
    trainer = cfg.instantiate(parent=None)
    trainer.step = 5
    defaults = {
        "trainer": trainer,
        "config_path": "config.txt",
        "start_step": 0,
        "stopped_by": None,
        "last": {},
        "last_report": {},
        "evaler_summaries": {},
        "throughput": Throughput(None, [H200]),
    }
    return types.SimpleNamespace(**defaults | fields)


def test_a_run_says_what_it_did_and_wrote(tmp_path, monkeypatch, report):
    monkeypatch.chdir(tmp_path)  # So that paths are short.
    cfg = tiny.trainer_config("run", max_step=2)
    loops = []
    monkeypatch.setattr("moelib.train.loop.report_run", lambda loop, **kw: loops.append((loop, kw)))
    out = cfg.instantiate(parent=None).run()
    ((loop, passed),) = loops
    assert passed["wall_seconds"] > 0
    title, rows = report(loop)
    assert title == "tiny: 2 of 2"
    val = out["evaler_summaries"]["val"]
    text = f"loss {val['loss']:.4f}, perplexity {np.exp(val['loss']):.2f}, bits/byte "
    assert rows["val"].startswith(text)
    assert {name: rows[name] for name in ("steps", "loss", "config", "metrics", "TensorBoard")} == {
        "steps": "2 of 2",
        "loss": f"{out['loss']:.4f}",
        "config": "run/config.txt",
        "metrics": "run/metrics.jsonl",
        "TensorBoard": "run/summaries",
    }
    assert rows["checkpoint"] == "step 2 in run/checkpoints"
    assert rows.keys() >= {"tokens/s", "TFLOP/s a device", "wall"}


def test_steps_tell_where_a_run_began_and_what_stopped_it(tmp_path, report):
    title, rows = report(make_loop(tmp_path, start_step=3, stopped_by="SIGTERM"))
    assert title == "tiny: 5 of 8, from 3 (SIGTERM)"
    assert rows["steps"] == "5 of 8, from 3 (SIGTERM)"


def test_a_run_without_a_step_has_neither_loss_nor_speed(tmp_path, report):
    _, rows = report(make_loop(tmp_path))
    assert rows.keys() == {"steps", "wall", "config", "metrics", "TensorBoard"}
    assert rows["wall"] == "1 min 40 s"


def test_evaluation_without_bytes_has_no_bits_a_byte(tmp_path, report):
    summaries = {"val": {"loss": 1.0, "perplexity": 2.718}}
    _, rows = report(make_loop(tmp_path, evaler_summaries=summaries))
    assert rows["val"] == "loss 1.0000, perplexity 2.72"


def test_speed_is_of_the_steps_and_time_is_split(tmp_path, report):
    throughput = Throughput(2e9, [H200, H200])
    throughput.total_tokens, throughput._total_slots = 900_000.0, 1_000_000
    throughput.total_seconds = {"input": 2.0, "step": 8.0, "checkpoint": 61.0, "evaluation": 0.04}
    loop = make_loop(tmp_path, throughput=throughput, last_report={"device_memory_gb": 3.0})
    _, rows = report(loop)
    assert rows["tokens/s"] == "90,000"  # 900,000 valid tokens in 10 s.
    assert rows["TFLOP/s a device"] == "100"  # 2e9 FLOPs x 1e6 / 10 s / 2 devices.
    assert rows["MFU"] == "10.1%"  # Of 989.
    assert rows["device memory"] == "3.00 GB at most"
    assert rows["wall"] == "1 min 40 s (input 2.0 s, step 8.0 s, checkpoint 1 min 01 s)"


def test_without_flops_there_are_tokens_alone(tmp_path, report):
    throughput = Throughput(None, [H200])
    throughput.total_tokens, throughput.total_seconds["step"] = 1000.0, 10.0
    _, rows = report(make_loop(tmp_path, throughput=throughput))
    assert rows["tokens/s"] == "100"
    assert not {"TFLOP/s a device", "MFU", "device memory"} & rows.keys()


def test_health_of_experts_is_of_the_last_step(tmp_path, report):
    _, rows = report(make_loop(tmp_path, last={"loss": 2.0, "decoder/moe/dead_experts": 3.0}))
    assert rows["loss"] == "2.0000"
    assert rows["experts without a token"] == "3.0 (worst layer 3.0)"


@pytest.mark.parametrize(
    ("formats", "written"),
    [((), set()), (("json_lines",), {"metrics"}), (("tensorboard",), {"TensorBoard"})],
)
def test_only_files_that_are_written_are_named(tmp_path, report, formats, written):
    cfg = tiny.trainer_config(tmp_path, evaler=False).set(checkpointer=None)
    cfg.summary_writer.formats = formats
    _, rows = report(make_loop(tmp_path, cfg))
    assert rows.keys() == {"steps", "wall", "config"} | written


def test_traces_are_named_if_any_were_asked_for(tmp_path, monkeypatch, report):
    monkeypatch.chdir(tmp_path)
    cfg = tiny.trainer_config("run", evaler=False).set(start_trace_steps=(2,))
    _, rows = report(make_loop(tmp_path, cfg))
    assert rows["traces"] == "run/profile"
