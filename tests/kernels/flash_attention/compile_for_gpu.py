"""Compiles the kernels for an H100, ahead of time; one line of JSON for each program.

A process of its own: python -m tests.kernels.flash_attention.compile_for_gpu
"""

import os

os.environ.update(JAX_PLATFORMS="cpu", MOSAIC_GPU_DUMP_PTXAS="1")
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)

import json

import jax
from jax.sharding import NamedSharding, PartitionSpec

from moelib.kernels.flash_attention import flash_attention
from moelib.planning.hlo.program import parse
from moelib.planning.report.kernels import kernels
from tests.kernels.flash_attention.cases import Case
from tests.kernels.gpu_topology import H100, mesh, traffic

# One sequence each.
CASES = {
    "32/4 heads of 128": Case(4096, 32, 4, 128, packed=True, dtype="bfloat16"),
    "gpt-oss": Case(4096, 64, 8, 64, window=128, sinks=True, packed=True, dtype="bfloat16"),
    "cap and window": Case(1003, 4, 4, 128, window=500, cap=30.0, packed=True, dtype="bfloat16"),
    "MLA": Case(1024, 4, 4, 192, dtype="bfloat16", v_dim=128),
    "head dim of 256": Case(1024, 4, 1, 256, packed=True, dtype="bfloat16"),
    "float16": Case(1000, 4, 1, 64, causal=False, dtype="float16"),
}


def compiled(case, over, backend="gpu"):
    """Returns value and gradients of a case, compiled."""

    def array(*shape, dtype=case.dtype):
        sharding = NamedSharding(over, PartitionSpec())
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    each = lambda heads, dim: array(1, case.seq_len, heads, dim)
    v_dim = case.v_dim or case.dim
    operands = {
        "q": each(case.heads, case.dim),
        "k": each(case.groups, case.dim),
        "v": each(case.groups, v_dim),
    }
    if case.sinks:
        operands["sinks"] = array(case.heads)
    ids = array(1, case.seq_len, dtype="int32") if case.packed else None

    def run(operands, ids, grad):
        attend = lambda operands: flash_attention(
            **operands, spec=case.spec(), segment_ids=ids, backend=backend
        )
        out, pull = jax.vjp(attend, operands)
        return out, pull(grad)

    return jax.jit(run).lower(operands, ids, each(case.heads, v_dim)).compile()


def main() -> None:
    """Prints, for each case, its kernels, launches, bytes and registers spilled."""
    over = mesh(H100)
    with jax.set_mesh(over):
        for name, case in CASES.items():
            made = compiled(case, over)
            program = parse(made.as_text())
            found = [each for each in kernels(program) if each.library == "mosaic gpu"]
            launches, moved, _ = traffic(program)
            plain = parse(compiled(case, over, "xla").as_text())
            figures = {
                "case": name,
                "kernels": sum(each.executions for each in found),
                "flops": sum(each.flops for each in found),
                "launches": launches,
                "bytes": moved,
                "bytes_in_plain_xla": traffic(plain)[1],
                "temp_bytes": made.memory_analysis().temp_size_in_bytes,
            }
            print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
