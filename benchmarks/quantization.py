"""Errors of quantized layers: `python -m benchmarks.quantization`.

Relative errors, by norm, of a layer's output and gradients in bfloat16, against the same layer in
float32 and for random weights and inputs. Layers are computed one by one, so that routing is the
same in all of them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moelib.core import tree
from moelib.core.module import functional
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.attention.latent import LatentAttention
from moelib.layers.feed_forward import FeedForward
from moelib.layers.moe.layer import MoELayer
from moelib.layers.quantization import Quantization
from moelib.runtime.table import Table, print_table

B, S, D = 2, 256, 512
LAYERS = {
    "grouped-query attention": GroupedQueryAttention.default_config().set(
        num_heads=8, num_kv_heads=2
    ),
    "latent attention": LatentAttention.default_config().set(
        num_heads=4,
        q_lora_rank=192,
        kv_lora_rank=128,
        nope_head_dim=64,
        rope_head_dim=32,
        v_head_dim=64,
    ),
    "feed-forward layer": FeedForward.default_config().set(hidden_dim=1024),
    "experts": MoELayer.default_config().set(
        hidden_dim=256, num_experts=8, num_experts_per_token=2
    ),
}


def run(cfg: Any, dtype: str, scheme: Quantization) -> dict[str, np.ndarray]:
    """Returns a layer's output and gradients, in the compute dtype."""
    layer = cfg.clone(name="layer", input_dim=D, quantization=scheme).instantiate(parent=None)
    params = layer.initialize_parameters_recursively(jax.random.key(0))
    keys = jax.random.split(jax.random.key(1))
    x, weights = (jax.random.normal(key, (B, S, D)) for key in keys)
    positions = jnp.broadcast_to(jnp.arange(S), (B, S))
    named = {"positions": positions} if "ttention" in type(layer).__name__ else {}

    @jax.jit
    def values(params: Any, x: jax.Array) -> Any:
        forward = lambda params, x: functional(
            layer, None, params, {"x": x, **named}, is_training=True
        )[0]
        y, pull = jax.vjp(forward, params, x)
        return y, *pull(weights.astype(y.dtype))

    cast = lambda path, a: a if "router" in path else a.astype(dtype)
    y, of_params, of_x = values(tree.map_by_path(cast, params), x.astype(dtype))
    found = {"output": y, "d input": of_x}
    found |= {f"d {path}": g for path, g in tree.by_path(of_params).items() if "router" not in path}
    return {name: np.asarray(value, np.float64) for name, value in found.items()}


def errors() -> Table:
    """Returns the table of errors."""
    rows, schemes = [], list(Quantization)
    for name, cfg in LAYERS.items():
        exact = run(cfg, "float32", Quantization.NONE)
        found = [run(cfg, "bfloat16", scheme) for scheme in schemes]
        for quantity, want in exact.items():
            error = functools.partial(np.linalg.norm, axis=None)
            shares = [error(each[quantity] - want) / error(want) for each in found]
            rows.append((name, quantity, *(f"{share:.2%}" for share in shares)))
    names = ("bfloat16", *(scheme.name for scheme in schemes[1:]))
    return Table("", ("layer", "of", *(f"{each}>" for each in names)), rows)


if __name__ == "__main__":
    print_table(errors())
