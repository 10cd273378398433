"""Compiles the kernels for one GPU or eight, ahead of time; one line of JSON for each program.

A process of its own: python -m tests.kernels.gmm.compile_for_gpu "NVIDIA H100 80GB HBM3" 8
"""

import os

os.environ.update(JAX_PLATFORMS="cpu", MOSAIC_GPU_DUMP_PTXAS="1")
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)

import json
import sys

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from moelib.kernels.gmm import gmm
from tests.kernels.gpu_topology import mesh

# Rows of each device, k, n, groups, dtype, options.
CASES = {
    "plain": ((16384, 2048, 2048, 16), "bfloat16", {}),
    "bias, transposed, float32": (
        (4096, 1024, 768, 8),
        "bfloat16",
        {"bias": True, "transpose_rhs": True, "preferred_element_type": "float32"},
    ),
    "few rows a group": ((1003, 192, 320, 32), "float16", {"bias": True}),
    "some groups of all": ((512, 64, 64, 8), "bfloat16", {"counted": 32}),
    "sides that do not fit": ((512, 136, 64, 4), "bfloat16", {}),
    "float32": ((512, 128, 64, 4), "float32", {}),
}


def compiled(case, over):
    """Returns value and gradients of a case, compiled."""
    (m, k, n, g), dtype, options = case
    options = dict(options)
    counted = options.pop("counted", g)
    size = over.size

    def array(*shape, dtype=dtype, split=False):
        spec = PartitionSpec("x") if split else PartitionSpec()
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(over, spec))

    turned = options.get("transpose_rhs", False)
    operands = {
        "lhs": array(size * m, k, split=True),
        "rhs": array(g, n, k) if turned else array(g, k, n),
    }
    if options.pop("bias", False):
        operands["bias"] = array(g, n)
    sizes = array(size * counted, dtype="int32", split=True)
    offset = array(dtype="int32") if counted != g else None

    def local(operands, sizes, offset):
        out = gmm(**operands, group_sizes=sizes, group_offset=offset, **options)
        return jax.lax.psum(jnp.sum(out.astype(jnp.float32) ** 2), "x")

    def loss(operands, sizes, offset):
        split = {
            name: PartitionSpec("x") if name == "lhs" else PartitionSpec() for name in operands
        }
        spec = split, PartitionSpec("x"), PartitionSpec()
        return jax.shard_map(local, mesh=over, in_specs=spec, out_specs=PartitionSpec())(
            operands, sizes, offset
        )

    lowered = jax.jit(jax.value_and_grad(loss)).lower(operands, sizes, offset)
    return lowered.compile()


def main(name: str, num_devices: int) -> None:
    """Prints, for each case, its kernels' names and the bytes it takes besides its operands."""
    over = mesh(name, num_devices)
    with jax.set_mesh(over):
        for case, what in CASES.items():
            program = compiled(what, over)
            text = program.as_text()
            found = {
                "case": case,
                "kernels": text.count('custom_call_target="mosaic_gpu'),
                "temp_bytes": program.memory_analysis().temp_size_in_bytes,
            }
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
