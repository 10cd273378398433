"""Compiled memory of pipelines, compared with the activations of one micro-batch."""

import pytest

from experiments import flame_moe
from moelib.parallel.mesh import mesh_shape_from_axes
from moelib.parallel.pipeline.schedule import Schedule
from moelib.planning.compiled.in_subprocess import CompileOptions, compile_in_subprocess
from moelib.planning.estimate.activations import NONE
from moelib.planning.estimate.candidates import current_candidate, rules_of
from moelib.planning.estimate.estimate import Estimator
from moelib.planning.estimate.workload import read_workload
from moelib.planning.hardware.topologies import describe
from tests.tiny import stacked


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "schedule", "num_layers", "dim", "seq_len", "batch_size", "limit"),
    [
        ("v6e:2x2", Schedule.DUALPIPE_V, 16, 256, 1024, 2, 9 / 8),  # (2P + 1) / 2P.
        ("v6e:2x2", Schedule.ONE_F_ONE_B, 16, 256, 1024, 2, 1.0),
        ("v6e:1x2", Schedule.DUALPIPE_V, 8, 512, 2048, 1, 5 / 4),
        ("v6e:1x2", Schedule.ONE_F_ONE_B, 8, 512, 2048, 1, 1.0),
    ],
)
def test_a_rank_holds_no_more_than_the_schedule_says(
    topology, schedule, num_layers, dim, seq_len, batch_size, limit
):
    pytest.importorskip("libtpu")
    shape = describe(topology)
    cfg = flame_moe.tiny().set(dir="unused", train_dtype="bfloat16", evalers={})
    cfg.model.set(dim=dim, decoder=stacked(cfg.model.decoder.block[0], num_layers=num_layers))
    cfg.input.set(seq_len=seq_len, global_batch_size=8 * batch_size)
    cfg.set(num_microbatches=8, pipeline_schedule=schedule)
    cfg.set(mesh_shape=mesh_shape_from_axes(pipeline=shape.num_devices))
    outcome = compile_in_subprocess(cfg, topology, CompileOptions(cache_dir=None), name="step")
    assert outcome.report is not None, outcome.failure
    work = read_workload(cfg)
    saved = work.saved[NONE]  # Of the whole model, as `jax.vjp` keeps them.
    micro = (saved.split + saved.whole + saved.routed) * batch_size * seq_len
    memory = Estimator(work, rules_of(cfg), {})(current_candidate(cfg, work, shape)).memory
    weights = memory["summed gradients"] + memory["weights of stages"]
    held = outcome.report.memory.peak - outcome.report.memory.arguments - weights
    assert 0.1 * micro < held <= limit * micro
