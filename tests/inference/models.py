"""Models with every kind of cache, and their logits computed from the whole text."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moelib.core import tree
from moelib.core.context import Nested
from moelib.core.module import functional
from moelib.core.param import is_spec
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.attention.indexer import Indexer
from moelib.layers.attention.latent import LatentAttention
from moelib.layers.base import BaseLayer
from moelib.layers.feed_forward import FeedForward
from moelib.layers.mixers.delta_net import DeltaNet
from moelib.layers.mixers.gated_delta_net import GatedDeltaNet
from moelib.layers.mixers.kimi_delta_attention import KimiDeltaAttention
from moelib.layers.mixers.mamba2 import Mamba2
from moelib.layers.moe.dispatch import DenseDispatcher
from moelib.layers.norm import RMSNorm
from moelib.layers.transformer import BaseStack, LoopStack, ScanStack, TransformerLayer
from moelib.models.causal_lm import CausalLM
from tests import tiny


def layer(feed_forward: BaseLayer.Config | None = None, **fields: Any) -> TransformerLayer.Config:
    """Returns a layer whose attention has these fields."""
    return TransformerLayer.default_config().set(
        self_attention=GroupedQueryAttention.default_config().set(num_heads=4, **fields),
        feed_forward=feed_forward or FeedForward.default_config().set(hidden_dim=8),
    )


def latent_layer(**fields: Any) -> TransformerLayer.Config:
    """Returns a layer that caches latents, with values wider than its queries and keys."""
    sizes = {"num_heads": 4, "kv_lora_rank": 6, "nope_head_dim": 4, "rope_head_dim": 2}
    attention = LatentAttention.default_config().set(v_head_dim=7, **sizes, **fields)
    return layer().set(self_attention=attention)


def indexer(**fields: Any) -> Indexer.Config:
    """Returns an indexer of two heads."""
    return Indexer.default_config().set(num_heads=2, index_dim=4, **fields)


def delta_layer(kind: type[DeltaNet] = GatedDeltaNet, **fields: Any) -> TransformerLayer.Config:
    """Returns a layer that caches a state and the inputs of convolutions."""
    sizes = {"num_value_heads": 4, "num_key_heads": 2, "key_head_dim": 6, "value_head_dim": 5}
    return layer().set(self_attention=kind.default_config().set(**sizes, **fields))


def mamba_layer(**fields: Any) -> TransformerLayer.Config:
    """Returns a layer with two groups of two heads."""
    sizes = {"num_heads": 4, "num_groups": 2, "state_dim": 6, "head_dim": 5}
    return layer().set(self_attention=Mamba2.default_config().set(**sizes, **fields))


def decoder(
    *block: BaseLayer.Config, kind: type[BaseStack] = ScanStack, first_layers: Any = ()
) -> BaseStack.Config:
    """Returns a stack of one block, or a scan over two."""
    repeats = 2 if kind is ScanStack else 1
    return kind.default_config().set(
        num_layers=len(first_layers) + repeats * len(block),
        first_layers=list(first_layers),
        block=list(block),
    )


def gpt_oss_block() -> list[BaseLayer.Config]:
    """Returns a layer with a window of 3 tokens and one without, both with experts."""
    fields = {"num_kv_heads": 2, "qkv_bias": True, "output_bias": True, "sinks": True}
    moe = tiny.moe(dispatcher=DenseDispatcher.default_config())
    return [layer(moe, **fields, window=window) for window in (3, None)]


NORM = RMSNorm.default_config()
DECODERS = {
    "plain": lambda: decoder(layer()),
    "grouped": lambda: decoder(layer(num_kv_heads=2, logit_cap=0.5, qk_norm=NORM)),
    "window": lambda: decoder(
        layer(window=3, qk_norm=NORM, qk_norm_joint=True, qkv_clip=0.9, rope=None, sinks=True)
    ),
    "factors and norms": lambda: decoder(
        layer(num_kv_heads=2, score_scale=0.3, rotated_qk_norm=NORM).set(
            norm=None, output_norm=NORM, residual_scale=0.7
        )
    ),
    "dense, then experts": lambda: decoder(*gpt_oss_block(), first_layers=[layer()]),
    "latent": lambda: decoder(latent_layer(), latent_layer(q_lora_rank=5, score_factor=1.3)),
    "sparse latent": lambda: decoder(latent_layer(q_lora_rank=5, indexer=indexer(num_chosen=3))),
    "delta": lambda: decoder(
        delta_layer(), layer(output_gate=True), delta_layer(KimiDeltaAttention, conv_width=2)
    ),
    "mamba": lambda: decoder(mamba_layer(), layer(), mamba_layer(conv_width=2)),
    "one part": lambda: decoder(
        mamba_layer().set(feed_forward=None), layer().set(self_attention=None), layer()
    ),
    "loop": lambda: decoder(layer(window=3), layer(), kind=LoopStack),
    "scan": lambda: decoder(layer(window=3), layer(), first_layers=[layer()]),
}


@functools.cache
def model_of(name: str, **fields: Any) -> tuple[CausalLM, Nested]:
    """Returns a model and parameters for it, none of them zero."""
    return with_parameters(tiny.model_config(DECODERS[name](), **fields))


def with_parameters(cfg: CausalLM.Config) -> tuple[CausalLM, Nested]:
    """Returns the model of a config and parameters for it, none of them zero."""
    model = cfg.instantiate(parent=None)
    specs = tree.flatten_items(model.create_parameter_specs_recursively(), is_spec)
    draw = np.random.default_rng(0).normal
    made: Nested = {}
    for path, spec in specs:
        *parents, name = path.split("/")
        inside = functools.reduce(
            lambda inside, parent: inside.setdefault(parent, {}), parents, made
        )
        mean = 1.0 if name == "scale" else 0.0
        inside[name] = jnp.asarray(draw(mean, 0.4, spec.shape), jnp.float32)
    return model, made


def whole_logits(model: CausalLM, params: Nested, ids: Any) -> jax.Array:
    """Returns the logits [B, S, V] of sequences without padding."""
    batch = {"input_ids": jnp.asarray(ids, jnp.int32)}
    return functional(model, None, params, (batch,), is_training=False, method="logits")[0]


@functools.partial(jax.jit, static_argnums=0)
def compiled_whole_logits(model: CausalLM, params: Nested, ids: Any) -> jax.Array:
    """Returns the same logits, compiled."""
    return whole_logits(model, params, ids)
