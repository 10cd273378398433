"""FLAME-MoE: seven Mixture-of-Experts models, their dense baselines, and a model for a laptop.

Source: H. Kang, FLAME-MoE, CMU-CS-26-106 (2026), and its training scripts; data: DCLM. Prepare the
data with the tokenizer of EleutherAI/pythia-12b, in splits of 90, 5 and 5 percent:

    moelib prepare --source='dclm/*.jsonl.zst' --tokenizer=tokenizer.json \
        --output=$DATA/dclm --splits=train=0.9,validation=0.05,test=0.05
    moelib train --module=experiments.flame_moe --config=flame-moe-38m-100m --data_dir=$DATA ...
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from moelib.checkpoint.checkpointer import Checkpointer
from moelib.checkpoint.policy import every_n_steps_and_last_policy
from moelib.core.config import config_for_function
from moelib.data.batches.lm_input import LMInput
from moelib.data.batches.packing import DocumentBoundary
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.feed_forward import FeedForward
from moelib.layers.initializers import constant, fan_in_normal, normal
from moelib.layers.linear import Linear
from moelib.layers.moe.balance import LoadBalanceLoss, RouterZLoss
from moelib.layers.moe.layer import MoELayer
from moelib.layers.remat import remat
from moelib.layers.transformer import BaseStack, LoopStack, ScanStack, TransformerLayer
from moelib.learner import schedules
from moelib.learner.learner import Learner
from moelib.models.causal_lm import CausalLM
from moelib.parallel.mesh import mesh_shape_from_axes
from moelib.train.evaler import SpmdEvaler
from moelib.train.trainer import SpmdTrainer

from .jobs import clipped_adamw, text_input

VOCAB_SIZE = 50_304  # The tokenizer's 50,277, padded.
SEQ_LEN = 2048
TINY_VOCAB_SIZE = 8192
BATCH_SIZE = 1024  # Sequences per step: 2,097,152 tokens.


class MoESize(NamedTuple):
    """Shape and schedule of a MoE model.

    Attributes:
        num_layers: Number of layers.
        dim: Model width.
        max_step: Number of steps.
        save_every: Steps between checkpoints.
        sequences_per_device: Sequences per micro-batch on each of the 32 devices of the source.
    """

    num_layers: int
    dim: int
    max_step: int
    save_every: int
    sequences_per_device: int

    @property
    def dense_hidden_dim(self) -> int:
        """Hidden width of the first layer, in DeepSeek-V2-Lite's ratio 10944 / 2048."""
        return self.dim * 10_944 // 2048

    @property
    def expert_hidden_dim(self) -> int:
        """Hidden width of an expert, in DeepSeek-V2-Lite's ratio 1408 / 2048."""
        return self.dim * 1408 // 2048


class DenseSize(NamedTuple):
    """Shape and schedule of a dense baseline."""

    num_layers: int
    dim: int
    hidden_dim: int
    num_heads: int
    max_step: int
    sequences_per_device: int


# The names are the source's; `published_name` computes them from the sizes.
MOE_SIZES = {
    "38m-100m": MoESize(9, 256, 2121, 212, 32),
    "98m-349m": MoESize(9, 512, 2424, 242, 32),
    "115m-459m": MoESize(12, 512, 4165, 416, 16),
    "290m-1.3b": MoESize(9, 1024, 5473, 540, 8),
    "419m-2.2b": MoESize(15, 1024, 5685, 568, 8),
    "721m-3.8b": MoESize(12, 1536, 8815, 880, 8),
    "1.7b-10.3b": MoESize(18, 2048, 11_029, 1100, 4),
}

# The shapes of 411m and 1.4b are published. Those of 77m and 191m are not; these have the published
# parameter counts. Steps are not published; these give 20 tokens per parameter.
DENSE_SIZES = {
    "77m": DenseSize(8, 512, 1408, 8, 737, 32),
    "191m": DenseSize(16, 768, 2048, 12, 1818, 16),
    "411m": DenseSize(24, 1024, 2816, 8, 3923, 8),
    "1.4b": DenseSize(24, 2048, 5632, 16, 13_726, 4),
}


def published_parameters(size: MoESize, *, num_experts: int) -> int:
    """Returns the parameter count behind a published name.

    The source's formula excludes the router and counts two of the first layer's three matrices;
    `moelib config --count` prints the true counts.

    Args:
        size: Shape of the model.
        num_experts: Experts per layer, shared ones included: 8 are active of 66 in total.
    """
    h, layers = size.dim, size.num_layers
    embeddings, attention, norms = 2 * VOCAB_SIZE * h, layers * 4 * h * h, (2 * layers + 1) * h
    first = 2 * h * size.dense_hidden_dim
    experts = (layers - 1) * num_experts * 3 * h * size.expert_hidden_dim
    return embeddings + attention + first + norms + experts


def published_name(size: MoESize) -> str:
    """Returns the published name, such as "38m-100m": active and total parameters."""
    return "-".join(_short(published_parameters(size, num_experts=n)) for n in (8, 66))


def _short(count: int) -> str:
    if count >= 1e9:
        return f"{count / 1e9:.1f}b"
    to_one_decimal = math.floor(count / 1e5 + 0.5) / 10
    return f"{math.floor(to_one_decimal + 0.5)}m"


def _layer(
    dim: int, num_heads: int, feed_forward: FeedForward.Config | MoELayer.Config
) -> TransformerLayer.Config:
    attention = GroupedQueryAttention.default_config().set(num_heads=num_heads)
    return TransformerLayer.default_config().set(
        input_dim=dim, self_attention=attention, feed_forward=feed_forward
    )


def moe_feed_forward(hidden_dim: int, *, num_experts: int = 64) -> MoELayer.Config:
    """Returns the MoE layer: top-6 routing, and shared experts of twice the width of one."""
    return MoELayer.default_config().set(
        hidden_dim=hidden_dim,
        num_experts=num_experts,
        num_experts_per_token=6,
        shared_experts=FeedForward.default_config().set(hidden_dim=2 * hidden_dim),
        load_balance_loss=LoadBalanceLoss.default_config().set(weight=0.01),
        router_z_loss=RouterZLoss.default_config().set(weight=1e-3),
    )


def language_model(dim: int, decoder: BaseStack.Config) -> CausalLM.Config:
    """Returns the model around a decoder: N(0, 0.02) weights, smaller before residual sums."""
    output_std = 0.02 / math.sqrt(2 * decoder.num_layers)
    return CausalLM.default_config().set(
        vocab_size=VOCAB_SIZE,
        dim=dim,
        decoder=decoder,
        param_init=config_for_function(normal).set(std=0.02),
        output_init=config_for_function(normal).set(std=output_std),
    )


def moe_model(size: MoESize) -> CausalLM.Config:
    """Returns a FLAME-MoE model: a dense layer followed by MoE layers."""
    dense = FeedForward.default_config().set(hidden_dim=size.dense_hidden_dim)
    decoder = ScanStack.default_config().set(
        num_layers=size.num_layers,
        first_layers=[_layer(size.dim, 16, dense)],
        block=[_layer(size.dim, 16, moe_feed_forward(size.expert_hidden_dim))],
        remat=config_for_function(remat),
    )
    return language_model(size.dim, decoder)


def dense_model(size: DenseSize) -> CausalLM.Config:
    """Returns a dense baseline."""
    feed_forward = FeedForward.default_config().set(hidden_dim=size.hidden_dim)
    decoder = ScanStack.default_config().set(
        num_layers=size.num_layers,
        block=[_layer(size.dim, size.num_heads, feed_forward)],
        remat=config_for_function(remat),
    )
    return language_model(size.dim, decoder)


def learner(max_step: int) -> Learner.Config:
    """Returns AdamW at 3e-4 with clipping at 1: 1% warmup, decay to 3e-5 over the last tenth."""
    schedule = config_for_function(schedules.wsd).set(
        peak_lr=3e-4,
        end_lr=3e-5,
        warmup_steps=0.01 * max_step,
        decay_steps=max_step // 10,
        decay="exponential",
    )
    adamw = clipped_adamw(schedule, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.01)
    return Learner.default_config().set(optimizer=adamw)


def _input(split: str) -> LMInput.Config:
    return text_input(
        "{data_dir}/dclm",
        split=split,
        seq_len=SEQ_LEN,
        global_batch_size=BATCH_SIZE,
        document_boundary=DocumentBoundary.CONTINUE,
        vocab_size=VOCAB_SIZE,
    )


def trainer(
    model: CausalLM.Config, *, max_step: int, save_every: int, sequences_per_device: int
) -> SpmdTrainer.Config:
    """Returns the job: bfloat16 compute, float32 parameters, evenly spaced checkpoints.

    Args:
        model: The model.
        max_step: Number of steps.
        save_every: Steps between checkpoints, all of which are kept.
        sequences_per_device: Sequences per micro-batch on each of the 32 devices of the source.
    """
    cfg = SpmdTrainer.default_config().set(
        model=model,
        learner=learner(max_step),
        input=_input("train"),
        max_step=max_step,
        train_dtype="bfloat16",
        num_microbatches=BATCH_SIZE // (32 * sequences_per_device),
        mesh_shape=mesh_shape_from_axes(fsdp=-1),
    )
    policy = config_for_function(every_n_steps_and_last_policy).set(n=save_every)
    cfg.checkpointer = Checkpointer.default_config().set(save_policy=policy, keep_last_n=None)
    cfg.evalers["validation"] = SpmdEvaler.default_config().set(
        input=_input("validation").set(max_batches=25),
        eval_policy=policy.clone(),
    )
    return cfg


def tiny() -> SpmdTrainer.Config:
    """Returns a FLAME-MoE for a laptop: 4 layers of width 128, top-2 of 16 experts.

    It learns within minutes on two CPU cores from little text, by small batches, a high learning
    rate with linear decay, fan-in initialization with zero output projections, a large vocabulary
    for its size, and a loop over layers, which needs no copies of stacked weights.
    """
    dense = FeedForward.default_config().set(hidden_dim=384)
    moe = moe_feed_forward(64, num_experts=16).set(num_experts_per_token=2)
    decoder = LoopStack.default_config().set(
        num_layers=4, first_layers=[_layer(128, 2, dense)], block=[_layer(128, 2, moe)]
    )
    model = language_model(128, decoder).set(
        vocab_size=TINY_VOCAB_SIZE,
        param_init=config_for_function(fan_in_normal),
        output_init=config_for_function(constant).set(value=0.0),
    )
    tables = config_for_function(normal).set(std=0.02)
    model.embedding.param_init = tables
    model.lm_head = Linear.default_config().set(param_init=tables.clone())
    schedule = config_for_function(schedules.linear).set(peak_lr=3e-3, warmup_steps=50)
    cfg = trainer(model, max_step=700, save_every=350, sequences_per_device=32)
    cfg.learner.optimizer = clipped_adamw(schedule, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1)
    cfg.set(train_dtype=None, mesh_shape=mesh_shape_from_axes(data=-1))
    for lm_input, batch_size in ((cfg.input, 8), (cfg.evalers["validation"].input, 32)):
        lm_input.set(seq_len=128, global_batch_size=batch_size, vocab_size=TINY_VOCAB_SIZE)
        lm_input.source.path = "{data_dir}/text"
        lm_input.document_boundary = DocumentBoundary.RESET
    cfg.evalers["validation"].input.max_batches = None
    return cfg


def _moe(size: MoESize) -> SpmdTrainer.Config:
    return trainer(
        moe_model(size),
        max_step=size.max_step,
        save_every=size.save_every,
        sequences_per_device=size.sequences_per_device,
    )


def _dense(size: DenseSize) -> SpmdTrainer.Config:
    return trainer(
        dense_model(size),
        max_step=size.max_step,
        save_every=size.max_step // 10,
        sequences_per_device=size.sequences_per_device,
    )


def named_trainer_configs() -> Mapping[str, Callable[[], SpmdTrainer.Config]]:
    """Returns the configs by name."""
    configs = {f"flame-moe-{n}": functools.partial(_moe, size) for n, size in MOE_SIZES.items()}
    configs |= {f"dense-{n}": functools.partial(_dense, size) for n, size in DENSE_SIZES.items()}
    return {**configs, "flame-moe-tiny": tiny}
