"""Steps compiled for absent GPUs. Requires JAX's CUDA plugin, as in moelib[plan-gpu]."""

import pytest

from experiments import flame_moe, llama
from moelib.parallel.mesh import HybridMeshShape, mesh_shape_from_axes
from moelib.planning.compiled.in_subprocess import CompileOptions, compile_in_subprocess
from moelib.planning.hardware import gpu_targets
from moelib.planning.hlo import program as hlo
from moelib.planning.hlo import values

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not gpu_targets.is_installed(), reason="JAX's CUDA plugin is not installed"),
]


@pytest.mark.parametrize(
    ("topology", "mesh_shape", "kernels"),
    [
        ("h100:1x4", mesh_shape_from_axes(expert=4), True),
        (
            "h100:2x4",
            HybridMeshShape(mesh_shape_from_axes(expert=4), mesh_shape_from_axes(fsdp=2)),
            True,
        ),
        ("b200:1x4", mesh_shape_from_axes(expert=4), False),
    ],
)
def test_the_step_of_experts_over_a_host_compiles(topology, mesh_shape, kernels, tmp_path):
    cfg = flame_moe.tiny().set(mesh_shape=mesh_shape, train_dtype="bfloat16")
    dumps = tmp_path / "dump"
    options = CompileOptions(dump_dir=str(dumps))
    outcome = compile_in_subprocess(cfg, topology, options, name="tiny")
    assert outcome.report is not None, outcome.failure
    figures = outcome.report.figures
    assert figures["memory.peak"] > figures["memory.arguments"] > 0
    (sent,) = [row for row in outcome.report.collectives if row.kind == "ragged-all-to-all"]
    assert (sent.axes, sent.group_size) == (["expert"], 4)  # Inside of hosts, and whole.
    assert ("mosaic_gpu" in (dumps / "hlo_optimized.txt").read_text()) == kernels
    libraries = {kernel.library for kernel in outcome.report.kernels}
    assert ("mosaic gpu" in libraries) == kernels


def test_no_stack_of_weights_is_copied_for_the_gathers_of_its_slices(tmp_path):
    """Only slices are transposed, in the loop over layers."""
    cfg = llama.named_trainer_configs()["llama-3.1-8b"]()
    cfg.set(mesh_shape=mesh_shape_from_axes(fsdp=4), train_dtype="bfloat16")
    cfg.model.decoder.num_layers = num_layers = 3
    cfg.input.set(global_batch_size=4, seq_len=1024)
    options = CompileOptions(dump_dir=str(tmp_path / "dump"))
    outcome = compile_in_subprocess(cfg, "h100:1x4", options, name="llama")
    assert outcome.report is not None, outcome.failure
    program = hlo.parse((tmp_path / "dump" / "hlo_optimized.txt").read_text())
    made = program.computations[program.entry].instructions.values()
    laid_out = [each for each in made if "transpose" in each.name or each.opcode == "copy"]
    # The optimizer's fusions, which read gradients in another layout, have several results.
    sizes = [values.dimensions(each.shape) for each in laid_out if not each.shape.startswith("(")]
    assert not [each for each in sizes if len(each) > 2 and num_layers in each]
