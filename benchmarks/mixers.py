"""Sequence mixers compiled for one device: `python -m benchmarks.mixers [TOPOLOGY] [MIXER ...]`.

Each layer, of 2,048 channels in bfloat16 with a mixing width of 4,096, takes one sequence, forward
and backward, without recomputation. Times are those of the program played in its order. A program
takes seconds to a minute; GPUs need the plugin of `moelib[plan-gpu]`.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moelib.core.config import did_you_mean
from moelib.core.module import functional
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.attention.indexer import Indexer
from moelib.layers.attention.latent import LatentAttention
from moelib.layers.mixers import delta_rule
from moelib.layers.mixers.gated_delta_net import GatedDeltaNet
from moelib.layers.mixers.kimi_delta_attention import KimiDeltaAttention
from moelib.layers.mixers.mamba2 import Mamba2
from moelib.planning.compiled.compile_step import no_compilation_cache
from moelib.planning.estimate import candidates
from moelib.planning.estimate.links import Links
from moelib.planning.hardware.topologies import Topology, describe, topology
from moelib.planning.hlo.program import parse
from moelib.planning.hlo.source import SourceMap
from moelib.planning.report.count import count
from moelib.planning.report.timeline import play, times
from moelib.runtime.table import Table, print_table

_LENGTHS = 4096, 32768, 131072
_DIM = 2048
_DELTA = {"num_value_heads": 32, "key_head_dim": 128, "value_head_dim": 128}


def mixers() -> dict[str, Any]:
    """Returns the layers' configs by name."""
    attention = GroupedQueryAttention.default_config()
    latent = LatentAttention.default_config().set(
        num_heads=32,
        q_lora_rank=1536,
        kv_lora_rank=512,
        nope_head_dim=128,
        rope_head_dim=64,
        v_head_dim=128,
    )
    indexer = Indexer.default_config().set(num_heads=64, index_dim=128, num_chosen=2048)
    return {
        "attention": attention.set(num_heads=32, num_kv_heads=4, head_dim=128),
        "latent attention": latent,
        "sparse attention": latent.clone(indexer=indexer),
        "gated delta net": GatedDeltaNet.default_config().set(**_DELTA, num_key_heads=16),
        "kimi delta attention": KimiDeltaAttention.default_config().set(**_DELTA),
        "mamba-2": Mamba2.default_config().set(num_heads=64, head_dim=64, state_dim=128),
    }


def figures(cfg: Any, length: int, on: Topology, *, token_by_token: bool = False) -> Mapping:
    """Returns the figures of a layer's values and gradients for a sequence, on one device."""
    layer = cfg.clone(input_dim=_DIM, name="layer").instantiate(parent=None)
    mesh = Mesh(np.array(on.devices[:1]), ("data",))
    whole = NamedSharding(mesh, PartitionSpec())

    def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    def run(params: Any, x: jax.Array, positions: jax.Array, grad: jax.Array) -> Any:
        def forward(params: Any, x: jax.Array) -> jax.Array:
            inputs = {"x": x, "positions": positions}
            return functional(layer, None, params, inputs, is_training=True)[0]

        value, pull = jax.vjp(forward, params, x)
        return value, pull(grad)

    shapes = jax.eval_shape(layer.initialize_parameters_recursively, jax.random.key(0))
    form = delta_rule.sequential if token_by_token else delta_rule.chunked
    with jax.set_mesh(mesh), no_compilation_cache(), mock.patch.object(delta_rule, "chunked", form):
        params = jax.tree.map(lambda x: array(x.shape, x.dtype), shapes)
        x = array((1, length, _DIM), jnp.bfloat16)
        compiled = jax.jit(run).lower(params, x, array((1, length), jnp.int32), x).compile()
    text = compiled.as_text() or ""
    program, sizes = parse(text), dict(mesh.shape)
    found = count(compiled, program, sizes, rows_routed=None, model_flops=0)["figures"]
    links = Links(describe(on.name), candidates.Mesh((("data", len(on.devices)),)))
    played = play(program, sizes, links, on.accelerator, SourceMap(text))
    return found | times(program, played, on.accelerator, found)


def main(names: Sequence[str]) -> None:
    """Compiles the mixers for a topology, and prints a row for each length."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # No accelerator is used.
    on = topology(names[0] if names else "v6e:2x2")
    known = mixers()
    if unknown := [name for name in names[1:] if name not in known]:
        sys.exit(f"There is no mixer {unknown[0]!r}; {did_you_mean(unknown[0], known)}")
    rows = []
    for name in names[1:] or known:
        jobs = [(name, length, False) for length in _LENGTHS]
        if name not in ("attention", "latent attention", "sparse attention"):
            jobs.append((f"{name}, token by token", _LENGTHS[0], True))
        for label, length, token_by_token in jobs:
            found = figures(known[name], length, on, token_by_token=token_by_token)
            moved = found["hbm_bytes"] + found["kernel_bytes"]
            flops = found["matmul_flops"] + found["kernel_flops"]
            rows.append(
                [
                    label,
                    f"{length:,}",
                    f"{1e3 * found['played.seconds']:.2f}",
                    f"{1e6 * found['played.seconds'] / length:.2f}",
                    f"{flops / 1e12:.2f}",
                    f"{moved / 2**30:.2f}",
                    f"{found['memory.temporaries'] / 2**30:.2f}",
                ]
            )
            print(*rows[-1], flush=True)
    columns = ["mixer", "tokens>", "ms>", "us per token>", "TFLOP>", "HBM, GiB>", "temporaries>"]
    print_table(Table(f"A layer with gradients, compiled for {on.name}", columns, rows))


if __name__ == "__main__":
    main(sys.argv[1:])
