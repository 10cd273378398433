"""GPT-OSS: the two published models, and a smaller one for comparison with MaxText.

Source: OpenAI, gpt-oss-120b & gpt-oss-20b Model Card (arXiv:2508.10925), and their configs. Their
training recipe is not published; they have the standard job of `jobs`.

`gpt-oss-3b-v6e4` has the shape of a MaxText step compiled for four TPU v6e: 16 layers of width
2048, top-2 of 16 experts, one sequence of 1024 tokens per device, experts split over two devices.
Both compiled steps are compared by

    moelib plan --module=experiments.gpt_oss --config=gpt-oss-3b-v6e4 --topology=v6e:2x2 \
        --current_mesh --compile=1 --compare=experiments/gpt_oss_maxtext.json
"""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

from moelib.core.config import config_for_function
from moelib.layers.activation import Activation
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.initializers import normal
from moelib.layers.moe.balance import LoadBalanceLoss
from moelib.layers.moe.experts import FeedForwardExperts
from moelib.layers.moe.layer import MoELayer
from moelib.layers.moe.router import Router, Score
from moelib.layers.norm import RMSNorm
from moelib.layers.remat import remat
from moelib.layers.rope import YarnRotaryEmbedding
from moelib.layers.transformer import ScanStack, TransformerLayer
from moelib.models.causal_lm import CausalLM
from moelib.train.trainer import SpmdTrainer

from .jobs import CHIPS, Job, trainer


class Size(NamedTuple):
    """Shape of a model."""

    num_layers: int
    dim: int
    num_heads: int
    num_experts: int
    num_experts_per_token: int
    hidden_dim: int
    vocab_size: int


SIZES = {
    "20b": Size(24, 2880, 64, 32, 4, 2880, 201_088),
    "120b": Size(36, 2880, 64, 128, 4, 2880, 201_088),
    "3b-v6e4": Size(16, 2048, 32, 16, 2, 2048, 32_768),
}


def _layer(size: Size, window: int | None) -> TransformerLayer.Config:
    rope = YarnRotaryEmbedding.default_config().set(
        theta=150_000.0, factor=32.0, original_context=4096, truncate=False
    )
    attention = GroupedQueryAttention.default_config().set(
        num_heads=size.num_heads,
        num_kv_heads=8,
        head_dim=64,
        qkv_bias=True,
        output_bias=True,
        sinks=True,
        window=window,
        rope=rope,
    )
    moe = MoELayer.default_config().set(
        hidden_dim=size.hidden_dim,
        num_experts=size.num_experts,
        num_experts_per_token=size.num_experts_per_token,
        router=Router.default_config().set(score=Score.SOFTMAX_AFTER_TOP_K, bias=True),
        experts=FeedForwardExperts.default_config().set(
            activation=Activation.CLAMPED_SWIGLU, bias=True
        ),
        load_balance_loss=LoadBalanceLoss.default_config().set(weight=0.01),
    )
    return TransformerLayer.default_config().set(
        self_attention=attention, feed_forward=moe, norm=RMSNorm.default_config().set(eps=1e-5)
    )


def model(size: Size) -> CausalLM.Config:
    """Returns the model: layers alternate between a window of 128 tokens and full attention."""
    decoder = ScanStack.default_config().set(
        num_layers=size.num_layers,
        block=[_layer(size, 128), _layer(size, None)],
        remat=config_for_function(remat),
    )
    return CausalLM.default_config().set(
        vocab_size=size.vocab_size,
        dim=size.dim,
        decoder=decoder,
        output_norm=RMSNorm.default_config().set(eps=1e-5),
        param_init=config_for_function(normal).set(std=0.02),
    )


def _trainer(size: Size, job: Job) -> SpmdTrainer.Config:
    return trainer(model(size), job)


def named_trainer_configs() -> Mapping[str, Callable[[], SpmdTrainer.Config]]:
    """Returns the configs by name."""
    jobs = {  # Tokens per sequence, sequences per step, meshes.
        "20b": (4096, 64, {CHIPS: {"fsdp": -1, "expert": 4}}),
        "120b": (4096, 256, {CHIPS: {"fsdp": -1, "expert": 8}}),
        "3b-v6e4": (1024, 4, {"tpu-v6e-4": {"fsdp": 2, "expert": 2}, CHIPS: {"fsdp": -1}}),
    }
    return {
        f"gpt-oss-{name}": functools.partial(
            _trainer, SIZES[name], Job(seq_len=seq_len, batch_size=batch_size, meshes=meshes)
        )
        for name, (seq_len, batch_size, meshes) in jobs.items()
    }
