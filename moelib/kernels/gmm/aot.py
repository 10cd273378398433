"""Which tiles a TPU's compiler takes, found by compiling ahead of time: no TPU is needed.

Checks the arithmetic of `tiles.vmem_bytes`: each kernel's limit of VMEM is what it says.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moelib.kernels.gmm import tpu
from moelib.kernels.gmm.tiles import Job, Tiles


def legal_tiles(job: Job, device: Any, tiles: Iterable[Tiles]) -> dict[Tiles, str | None]:
    """Returns for each of the tiles None if its kernel compiles, else the compiler's own words.

    Args:
        job: What is to be multiplied; operands and result are float32 if of 4 bytes, else bfloat16.
        device: A TPU, or one of a topology from `jax.experimental.topologies`.
        tiles: Those to try.
    """
    return {each: _compiles(job, device, each) for each in tiles}


def _compiles(job: Job, device: Any, tiles: Tiles) -> str | None:
    mesh = Mesh(np.array([device]), ("device",))
    dtype = jnp.float32 if job.dtype_bytes == 4 else jnp.bfloat16
    kw = {
        "out_dtype": jnp.float32 if job.out_bytes == 4 else jnp.bfloat16,
        "tiles": tiles,
        "interpret": False,
    }

    def shape(*sides: int, dtype: Any = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sides, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    sizes = shape(job.g, dtype=jnp.int32)
    rows = shape(job.m, job.k)
    if job.weight_gradient:
        run = lambda *x: tpu.gmm_weight_gradient(*x, **kw)
        operands = rows, shape(job.m, job.n), sizes
    elif job.parts == 1 and not job.saves:
        run = lambda *x: tpu.gmm(*x, transpose_rhs=False, **kw)
        operands = rows, shape(job.g, job.k, job.n), sizes
    else:
        join = lambda *parts: sum(parts[1:], parts[0])
        run = lambda *x: tpu.gmm_activated(*x, activation=join, save=job.saves, **kw)
        operands = rows, shape(job.g, job.parts, job.k, job.n), sizes
    with jax.set_mesh(mesh):
        try:
            jax.jit(run).lower(*operands).compile()
        except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
            return str(error)
    return None
