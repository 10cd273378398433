"""Compiled pipelines: memory, compared with the activations of one micro-batch; collectives."""

import collections

import pytest

from experiments import flame_moe
from moelib.core.config import config_for_function
from moelib.layers.remat import remat as recompute
from moelib.parallel.mesh import mesh_shape_from_axes
from moelib.parallel.pipeline.schedule import Schedule
from moelib.parallel.pipeline.ticks import ticks_of
from moelib.planning.compiled.in_subprocess import compile_in_subprocess
from moelib.planning.estimate.activations import NONE
from moelib.planning.estimate.candidates import current_candidate, rules_of
from moelib.planning.estimate.estimate import Estimator
from moelib.planning.estimate.workload import read_workload
from moelib.planning.hardware.topologies import describe
from tests.tiny import stacked


def compiled(topology, schedule, axes, *, num_layers, dim, seq_len, batch_size, remat=False):
    """Returns a config of 8 micro-batches, and the report of its compiled step."""
    pytest.importorskip("libtpu")
    cfg = flame_moe.tiny().set(dir="unused", train_dtype="bfloat16", evalers={})
    decoder = stacked(cfg.model.decoder.block[0], num_layers=num_layers)
    cfg.model.set(
        dim=dim, decoder=decoder.set(remat=config_for_function(recompute) if remat else None)
    )
    cfg.input.set(seq_len=seq_len, global_batch_size=8 * batch_size)
    cfg.set(num_microbatches=8, pipeline_schedule=schedule)
    cfg.set(mesh_shape=mesh_shape_from_axes(**axes))
    outcome = compile_in_subprocess(cfg, topology, name="step")
    assert outcome.report is not None, outcome.failure
    return cfg, outcome.report


@pytest.mark.slow
def test_gradients_of_a_stage_are_reduce_scattered():
    axes = {"pipeline": 2, "fsdp": 2}
    _, report = compiled(
        "v6e:2x2", Schedule.ONE_F_ONE_B, axes, num_layers=8, dim=256, seq_len=1024, batch_size=4
    )
    moved = collections.Counter()
    for each in report.collectives:
        if "fsdp" in each.axes:
            moved[each.kind] += each.bytes
    assert moved["all-reduce"] < 0.01 * moved["reduce-scatter"]


@pytest.mark.slow
def test_a_ring_of_attention_compiles_in_branches_of_ranks():
    """CPUs hang in this program, see `tests/train/test_pipeline.py`."""
    axes, sizes = {"pipeline": 2, "seq": 2}, {"dim": 256, "seq_len": 1024, "batch_size": 2}
    _, report = compiled("v6e:2x2", Schedule.DUALPIPE_V, axes, num_layers=4, **sizes)
    permuted = {
        tuple(each.axes) for each in report.collectives if each.kind == "collective-permute"
    }
    assert permuted >= {("pipeline",), ("seq",)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "schedule", "num_layers", "dim", "seq_len", "batch_size", "recomputed"),
    [
        ("v6e:2x2", Schedule.DUALPIPE_V, 16, 256, 1024, 2, True),
        ("v6e:2x2", Schedule.ONE_F_ONE_B, 16, 256, 1024, 2, True),
        ("v6e:1x2", Schedule.DUALPIPE_V, 8, 512, 2048, 1, True),
        ("v6e:1x2", Schedule.DUALPIPE_V, 8, 512, 2048, 1, False),
        ("v6e:1x2", Schedule.ONE_F_ONE_B, 8, 512, 2048, 1, False),
    ],
)
def test_a_rank_holds_no_more_than_the_schedule_says(
    topology, schedule, num_layers, dim, seq_len, batch_size, recomputed
):
    shape = describe(topology)
    num_ranks = shape.num_devices
    sizes = {"num_layers": num_layers, "dim": dim, "seq_len": seq_len, "batch_size": batch_size}
    cfg, report = compiled(topology, schedule, {"pipeline": num_ranks}, remat=recomputed, **sizes)
    work = read_workload(cfg)
    saved = work.saved[NONE]  # Of the whole model, as `jax.vjp` keeps them.
    micro = (saved.split + saved.whole + saved.routed) * batch_size * seq_len
    memory = Estimator(work, rules_of(cfg), {})(current_candidate(cfg, work, shape)).memory
    weights = memory["summed gradients"] + memory["weights of stages"]
    held = report.figures["memory.peak"] - report.figures["memory.arguments"] - weights
    # Without recomputation, also what a slot reads and computes, and deferred weight gradients.
    ticks = ticks_of(schedule, num_ranks, 8)
    more = 0 if recomputed else 0.75 + ticks.num_deferred
    limit = (ticks.num_saved + more) / (num_ranks * schedule.num_chunks)
    assert 0.1 * micro < held <= limit * micro
