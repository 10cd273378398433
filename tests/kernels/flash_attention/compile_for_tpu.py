"""Compiles the kernels for TPUs, ahead of time; one line of JSON for each compiled program.

Run by `tests.kernels.tpu_topology.compile_apart`; arguments are topologies, or topology=program.
"""

import functools
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moelib.kernels.flash_attention import MaskSpec, Positions, flash_attention
from moelib.kernels.flash_attention.passes import attention_backward, attention_forward
from tests.kernels.flash_attention.cases import Case

CASES = {
    # GPT-OSS: a group of 8 heads of 64.
    "plain": Case(256, 8, 1, 64, dtype="bfloat16"),
    "all options": Case(
        512, 8, 1, 64, window=128, sinks=True, cap=30.0, packed=True, dtype="bfloat16"
    ),
    "float32, off the block": Case(300, 4, 2, 192, causal=False),
    "head dim of 80": Case(256, 2, 2, 80, dtype="bfloat16"),
    "large blocks": Case(2048, 2, 2, 128, dtype="bfloat16"),
    "latent": Case(1024, 2, 2, 192, dtype="bfloat16", v_dim=128),
    "many heads": Case(1024, 16, 1, 256, dtype="bfloat16"),
}


def whole(case):
    """Returns the loss of a case, and its operands."""
    operands: dict[str, Any] = {
        "q": ((2, case.seq_len, case.heads, case.dim), case.dtype),
        "k": ((2, case.seq_len, case.groups, case.dim), case.dtype),
        "v": ((2, case.seq_len, case.groups, case.v_dim or case.dim), case.dtype),
    }
    if case.sinks:
        operands["sinks"] = (case.heads,), case.dtype
    others = {"segment_ids": ((2, case.seq_len), "int32")} if case.packed else {}

    def loss(params, others):
        return jnp.sum(flash_attention(**params, **others, spec=case.spec()).astype(jnp.float32))

    return jax.value_and_grad(loss), (operands, others)


def pair():
    """Returns the passes of one pair of shards, forward and backward, and their operands."""

    def passes(x):
        q, k, v, spec = x["q"], x["k"], x["v"], MaskSpec(128**-0.5, window=300)
        positions = Positions(x["q_index"], x["k_index"])
        out, lse = attention_forward(q, k, v, positions, spec)
        return out, attention_backward(q, k, v, out, lse, q, positions, spec)

    operands: dict[str, Any] = {
        "q": ((1, 512, 4, 128), "bfloat16"),
        "k": ((1, 512, 2, 128), "bfloat16"),
        "v": ((1, 512, 2, 128), "bfloat16"),
        "q_index": ((512,), "int32"),
        "k_index": ((512,), "int32"),
    }
    return passes, (operands,)


def split(program, devices):
    """Returns a program on two devices, with what varies over mesh axes checked."""
    run, operands = program
    mesh = Mesh(np.array(devices)[:2], ("x",))
    spec = PartitionSpec("x")
    operands = jax.tree.map(lambda x: _on(NamedSharding(mesh, spec), x), operands, is_leaf=_is_leaf)

    def local(*operands):
        loss, grads = run(*operands)
        return jax.lax.psum(loss, "x"), grads

    out_specs = PartitionSpec(), spec
    return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=out_specs), operands


def _on(sharding, operand):
    return (
        operand
        if hasattr(operand, "sharding")
        else jax.ShapeDtypeStruct(*operand, sharding=sharding)
    )


def _is_leaf(operand):
    return hasattr(operand, "sharding") or (
        isinstance(operand, tuple) and isinstance(operand[0], tuple)
    )


def main(names):
    for name in names:
        name, _, only = name.partition("=")
        devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
        sharding = NamedSharding(Mesh(np.array(devices)[:1], ("x",)), PartitionSpec())
        programs = {case: whole(CASES[case]) for case in CASES} | {"shards": pair()}
        programs["in shard_map"] = split(programs["plain"], devices)
        for program, (run, operands) in programs.items():
            if only not in ("", program):
                continue
            shapes = jax.tree.map(functools.partial(_on, sharding), operands, is_leaf=_is_leaf)
            compiled = jax.jit(run).lower(*shapes).compile()
            figures = {
                "topology": name,
                "program": program,
                "kernels": compiled.as_text().count('custom_call_target="tpu_custom_call"'),
                "flops": compiled.cost_analysis()["flops"],
                "temp": compiled.memory_analysis().temp_size_in_bytes,
            }
            print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
