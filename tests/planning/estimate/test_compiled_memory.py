"""The memory of steps that the installed libtpu compiles, against its estimate.

No constant was fitted to these shapes. A later compiler that needs more shows here.
"""

import pytest

from experiments import flame_moe
from moelib.core.config import config_for_function
from moelib.layers.remat import remat
from moelib.parallel.mesh import mesh_shape_from_axes
from moelib.planning.compiled.in_subprocess import compile_in_subprocess
from moelib.planning.estimate.candidates import current_candidate, rules_of
from moelib.planning.estimate.estimate import MEMORY_ERROR, Estimator
from moelib.planning.estimate.workload import read_workload
from moelib.planning.hardware.topologies import describe
from tests.tiny import stacked


def _config(axes, *, dense=False, recomputed=True, num_microbatches=1):
    """Returns a model of four layers of the width 512, with 16 sequences of 1,024 tokens."""
    cfg = flame_moe.tiny().set(dir="unused", train_dtype="bfloat16", evalers={})
    decoder = cfg.model.decoder
    layer = (decoder.first_layers if dense else decoder.block)[0]
    layer.self_attention.set(num_heads=4, head_dim=128)
    chosen = config_for_function(remat) if recomputed else None
    cfg.model.set(dim=512, decoder=stacked(layer, num_layers=4).set(remat=chosen))
    cfg.input.set(seq_len=1024, global_batch_size=16)
    return cfg.set(mesh_shape=mesh_shape_from_axes(**axes), num_microbatches=num_microbatches)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "axes", "settings"),
    [
        ("v6e:2x2", {"expert": 4}, {}),
        ("v5p:2x2x1", {"fsdp": 2, "model": 2}, {"dense": True, "recomputed": False}),
        ("v5e:2x4", {"fsdp": 8}, {"num_microbatches": 2}),
    ],
)
def test_a_step_that_fits_by_its_estimate_fits(topology, axes, settings):
    pytest.importorskip("libtpu")
    cfg = _config(axes, **settings)
    work = read_workload(cfg)
    estimate = Estimator(work, rules_of(cfg), {})(current_candidate(cfg, work, describe(topology)))
    outcome = compile_in_subprocess(cfg, topology, name="step")
    assert outcome.report is not None, outcome.failure
    peak = outcome.report.figures["memory.peak"]
    assert peak / (1 + MEMORY_ERROR) <= estimate.bytes_held <= peak * 1.3, (
        estimate.bytes_held / 2**30,
        peak / 2**30,
        estimate.memory,
    )
