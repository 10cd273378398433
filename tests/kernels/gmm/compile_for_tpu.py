"""Compiles the kernels for a TPU, ahead of time; one JSON object of errors by job and tiles.

Run by `tests.kernels.tpu_topology.compile_apart`.
"""

import dataclasses
import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moelib.kernels.gmm import tpu
from moelib.kernels.gmm.tpu_tiles import Job, Tiles, candidates, choose, current_chip, vmem_bytes

JOBS = [
    Job(4096, 2048, 2048, 8, 2),
    Job(4096, 2048, 2048, 8, 2, parts=2, saves=True),
    Job(81920, 7168, 2048, 4, 2, parts=2, saves=True),  # DeepSeek-V3, 64 devices.
    Job(81920, 7168, 2048, 4, 2),
    Job(81920, 2048, 7168, 4, 2, parts=2, num_lhs=2),
    Job(81920, 7168, 2048, 4, 2, weight_gradient=True),
    Job(4096, 2880, 2880, 4, 2, parts=2),
    Job(4096, 2880, 2880, 4, 2),
    Job(300, 200, 72, 3, 4),
    Job(4096, 2048, 2048, 8, 2, weight_gradient=True),
    Job(4096, 2880, 2880, 4, 2, weight_gradient=True),
]


def _clamped(gate, up):
    gate, up = jnp.minimum(gate, 7), jnp.clip(up, -7, 7)  # GPT-OSS.
    return (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)


def error_of(job: Job, mesh: Mesh, tiles: Tiles) -> str | None:
    """Returns the compiler's error for a kernel, or None if it compiles."""
    sharding = NamedSharding(mesh, PartitionSpec())
    dtype = jnp.float32 if job.dtype_bytes == 4 else jnp.bfloat16
    shape = lambda *sides: jax.ShapeDtypeStruct(sides, dtype, sharding=sharding)
    sizes = jax.ShapeDtypeStruct((job.g,), jnp.int32, sharding=sharding)
    rows = shape(job.m, job.k)
    if job.weight_gradient:
        run = functools.partial(tpu.weight_gradient, with_sums=False, tiles=tiles)
        operands = rows, (shape(job.m, job.n),), sizes
    elif job.num_lhs > 1:
        run = functools.partial(tpu.input_gradient, tiles=tiles)
        operands = (rows,) * job.num_lhs, shape(job.g, job.parts, job.n, job.k), sizes
    else:
        join = _clamped if job.parts == 2 else None
        run = functools.partial(tpu.forward, activation=join, save=job.saves, tiles=tiles)
        operands = rows, shape(job.g, job.parts, job.k, job.n), sizes, None
    try:
        jax.jit(run).lower(*operands).compile()
    except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
        return str(error)
    return None


def main(topology: str) -> None:
    """Compiles each job with the tiles chosen and the largest that fit, and one that cannot fit."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = Mesh(np.array(devices[:1]), ("device",))
    found = {}
    with jax.set_mesh(mesh):
        chip = current_chip()
        for job in JOBS:
            fitting = [t for t in candidates(job) if vmem_bytes(job, t) <= chip.vmem_bytes // 2]
            largest = max(fitting, key=lambda t: vmem_bytes(job, t))
            for tiles in sorted({choose(job, chip), largest}, key=str):
                found[f"{job} {tiles}"] = error_of(job, mesh, tiles)
        huge = dataclasses.replace(choose(JOBS[0], chip), m=16384)
        found["huge"] = error_of(dataclasses.replace(JOBS[0], m=65536), mesh, huge)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
