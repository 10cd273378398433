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

from moelib.kernels.gmm import gmm, gmm_activated
from moelib.planning.hlo.program import parse
from tests.kernels.gpu_topology import mesh, traffic

# Rows of each device, k, n, groups, dtype, whether there is a bias.
CASES = {
    "plain": ((16384, 2048, 2048, 16), "bfloat16", False),
    "bias": ((4096, 1024, 768, 8), "bfloat16", True),
    "few rows per group": ((1003, 192, 320, 32), "float16", True),
    "sides that do not fit": ((512, 136, 64, 4), "bfloat16", False),
    "float32": ((512, 128, 64, 4), "float32", False),
}

# Qwen3-30B-A3B on 8 devices, expert=8: rows of a round of the exchange, D, F, local experts.
EXPERTS = (40960, 2048, 768, 16)


def compiled_experts(over):
    """Returns value and gradients of gated experts, compiled: gate and up, SwiGLU, down."""
    m, k, n, g = EXPERTS

    def array(*shape, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(over, PartitionSpec()))

    swiglu = lambda gate, up: jax.nn.silu(gate) * up

    def run(rows, gate_up, down, sizes, grad):
        def experts(rows, gate_up, down):
            hidden = gmm_activated(rows, gate_up, sizes, activation=swiglu)
            return gmm(hidden, down, sizes)

        out, pull = jax.vjp(experts, rows, gate_up, down)
        return out, pull(grad)

    rows = array(m, k)
    operands = rows, array(g, 2, k, n), array(g, n, k), array(g, dtype="int32"), rows
    return jax.jit(run).lower(*operands).compile()


def compiled(case, over):
    """Returns value and gradients of a case, compiled."""
    (m, k, n, g), dtype, has_bias = case

    def array(*shape, dtype=dtype, split=False):
        spec = PartitionSpec("x") if split else PartitionSpec()
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(over, spec))

    operands = {"lhs": array(over.size * m, k, split=True), "rhs": array(g, k, n)}
    if has_bias:
        operands["bias"] = array(g, n)
    sizes = array(over.size * g, dtype="int32", split=True)

    def local(operands, sizes):
        out = gmm(**operands, group_sizes=sizes)
        return jax.lax.psum(jnp.sum(out.astype(jnp.float32) ** 2), "x")

    def loss(operands, sizes):
        split = {
            name: PartitionSpec("x") if name == "lhs" else PartitionSpec() for name in operands
        }
        specs = split, PartitionSpec("x")
        run = jax.shard_map(local, mesh=over, in_specs=specs, out_specs=PartitionSpec())
        return run(operands, sizes)

    return jax.jit(jax.value_and_grad(loss)).lower(operands, sizes).compile()


def main(name: str, num_devices: int) -> None:
    """Prints, for each case, its kernels, launches, bytes and temporary bytes."""
    over = mesh(name, num_devices)
    with jax.set_mesh(over):
        for case, what in CASES.items():
            report(case, compiled(what, over))
        if num_devices == 1:
            report("gated experts", compiled_experts(over))


def report(case: str, made: jax.stages.Compiled) -> None:
    """Prints the line of a case."""
    text = made.as_text()
    launches, moved, outside = traffic(parse(text))
    found = {
        "case": case,
        "kernels": text.count('custom_call_target="mosaic_gpu'),
        "launches": launches,
        "bytes": moved,
        "bytes_outside_kernels": outside,
        "temp_bytes": made.memory_analysis().temp_size_in_bytes,
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
