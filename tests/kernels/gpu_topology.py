"""GPUs to compile for where there are none, which the CUDA plugin describes, and bytes of programs.

Needs the packages of requirements-gpu-aot.txt, in an environment of their own. Kernels of one
architecture a process.
"""

import pathlib
import subprocess
import sys

import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh

from moelib.planning.hardware.gpu_targets import PLUGIN, target_configs
from moelib.planning.hlo.program import Program
from moelib.planning.hlo.values import shape_bytes
from moelib.planning.report.kernels import library

H100 = "NVIDIA H100 80GB HBM3"
B200 = "NVIDIA B200"
A100 = "NVIDIA A100-SXM4-80GB"

# Instructions that start no kernel and move no bytes.
_FREE = ("bitcast", "call", "conditional", "constant", "get-tuple-element", "parameter", "tuple")


def mesh(name: str, num_devices: int = 1) -> Mesh:
    """Returns a mesh, of one axis "x", of so many GPUs of a name."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target_configs()[name], topology=f"1x1x{num_devices}"
    )
    return Mesh(np.array(topology.devices), ("x",))


def traffic(program: Program) -> tuple[int, int, int]:
    """Returns launches, bytes of their operands and results, and those outside Pallas kernels."""
    launches, moved, outside = 0.0, 0.0, 0.0
    for computation, each in program.unfused():
        if each.opcode in _FREE:
            continue
        shapes = [computation.instructions[name].shape for name in each.operands]
        own = computation.executions * sum(map(shape_bytes, [each.shape, *shapes]))
        launches += computation.executions
        moved += own
        outside += 0 if library(each) == "mosaic gpu" else own
    return round(launches), round(moved), round(outside)


def printed(module: str, *arguments: str) -> str:
    """Returns what a module that compiles for GPUs prints, in a process of its own."""
    pytest.importorskip(PLUGIN)
    command = [sys.executable, "-m", module, *arguments]
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(
        command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


needs_hopper = pytest.mark.skipif(
    "jax.default_backend() != 'gpu' or jax.devices()[0].compute_capability != '9.0'",
    reason="no Hopper GPU",
)
