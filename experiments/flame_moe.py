"""FLAME-MoE: seven Mixture-of-Experts models, their dense baselines, and one for a laptop.

Source: H. Kang, FLAME-MoE, CMU-CS-26-106 (2026), and its training scripts; data: DCLM. Prepare the
data with the tokenizer of EleutherAI/pythia-12b, in splits of 90, 5 and 5 percent:

    moelib prepare --source 'dclm/*.jsonl.zst' --tokenizer tokenizer.json \
        --output $DATA/dclm --splits train=0.9,validation=0.05,test=0.05
    moelib train --module experiments.flame_moe --config flame-moe-38m-100m --data_dir $DATA ...
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from moelib.checkpoint.checkpointer import Checkpointer
from moelib.checkpoint.policy import every_n_steps_and_last_policy
from moelib.core.config import config_for_function
from moelib.data.lm_input import InputMode, LMInput
from moelib.data.packing import DocumentBoundary
from moelib.data.token_store import TokenStore
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.feed_forward import FeedForward
from moelib.layers.initializers import constant, fan_in_normal, normal
from moelib.layers.linear import Linear
from moelib.layers.moe.balance import LoadBalanceLoss, RouterZLoss
from moelib.layers.moe.layer import MoELayer
from moelib.layers.norm import BaseNorm
from moelib.layers.remat import remat
from moelib.layers.transformer import BaseStack, LoopStack, ScanStack, TransformerLayer
from moelib.learner import schedules, transforms
from moelib.learner.learner import Learner
from moelib.learner.optimizers import adamw_optimizer
from moelib.models.causal_lm import CausalLM
from moelib.parallel.mesh import mesh_shape_from_axes
from moelib.train.evaler import SpmdEvaler
from moelib.train.trainer import SpmdTrainer

VOCAB_SIZE = 50_304  # 50,277 of the tokenizer, padded.
SEQ_LEN = 2048
TINY_VOCAB_SIZE = 8192
BATCH_SIZE = 1024  # Rows of a step: 2,097,152 tokens.


class MoESize(NamedTuple):
    """A row of the recipe: layers L, width h, steps, steps between checkpoints, rows a device."""

    num_layers: int
    dim: int
    max_step: int
    save_every: int
    rows_per_device: int

    @property
    def dense_hidden_dim(self) -> int:
        """F, of the first layer's dense feed-forward: DeepSeek-V2-Lite's ratio, 10944 / 2048."""
        return self.dim * 10_944 // 2048

    @property
    def expert_hidden_dim(self) -> int:
        """f, of each expert: DeepSeek-V2-Lite's ratio, 1408 / 2048."""
        return self.dim * 1408 // 2048


class DenseSize(NamedTuple):
    """A row of the dense baselines."""

    num_layers: int
    dim: int
    hidden_dim: int
    num_heads: int
    max_step: int
    rows_per_device: int


# The names are those of the thesis: `published_name` gives them from the sizes.
MOE_SIZES = {
    "38m-100m": MoESize(9, 256, 2121, 212, 32),
    "98m-349m": MoESize(9, 512, 2424, 242, 32),
    "115m-459m": MoESize(12, 512, 4165, 416, 16),
    "290m-1.3b": MoESize(9, 1024, 5473, 540, 8),
    "419m-2.2b": MoESize(15, 1024, 5685, 568, 8),
    "721m-3.8b": MoESize(12, 1536, 8815, 880, 8),
    "1.7b-10.3b": MoESize(18, 2048, 11_029, 1100, 4),
}

# Shapes of 411m and 1.4b are published. Those of 77m and 191m are not: these have the published
# counts. Steps are not published: 20 tokens a parameter.
DENSE_SIZES = {
    "77m": DenseSize(8, 512, 1408, 8, 737, 32),
    "191m": DenseSize(16, 768, 2048, 12, 1818, 16),
    "411m": DenseSize(24, 1024, 2816, 8, 3923, 8),
    "1.4b": DenseSize(24, 2048, 5632, 16, 13_726, 4),
}


def published_parameters(size: MoESize, *, num_experts: int) -> int:
    """Returns the count behind the published names, with 8 active or 66 total experts a layer.

    It leaves the router out and counts two matrices of the first layer's three; `moelib config
    --count` gives the true counts.
    """
    h, layers = size.dim, size.num_layers
    embeddings, attention, norms = 2 * VOCAB_SIZE * h, layers * 4 * h * h, (2 * layers + 1) * h
    first = 2 * h * size.dense_hidden_dim
    experts = (layers - 1) * num_experts * 3 * h * size.expert_hidden_dim
    return embeddings + attention + first + norms + experts


def published_name(size: MoESize) -> str:
    """Returns "38m-100m": active and total millions or billions, rounded as the authors did."""
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
    """Returns the MoE layer: top-6 of the routed experts, and shared ones of twice their width."""
    return MoELayer.default_config().set(
        hidden_dim=hidden_dim,
        num_experts=num_experts,
        num_experts_per_token=6,
        shared_experts=FeedForward.default_config().set(hidden_dim=2 * hidden_dim),
        load_balance_loss=LoadBalanceLoss.default_config().set(weight=0.01),
        router_z_loss=RouterZLoss.default_config().set(weight=1e-3),
    )


def language_model(dim: int, decoder: BaseStack.Config) -> CausalLM.Config:
    """Returns the model around a decoder: N(0, 0.02) weights, less where they write the stream."""
    output_std = 0.02 / math.sqrt(2 * decoder.num_layers)
    model = CausalLM.default_config().set(
        vocab_size=VOCAB_SIZE,
        dim=dim,
        decoder=decoder,
        param_init=config_for_function(normal).set(std=0.02),
        output_init=config_for_function(normal).set(std=output_std),
    )
    assert isinstance(model.output_norm, BaseNorm.Config)
    return model


def moe_model(size: MoESize) -> CausalLM.Config:
    """Returns a FLAME-MoE model: the first layer is dense, the others are MoE layers."""
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
    """Returns AdamW at 3e-4, WSD: 1% warmup, a last tenth that decays to 3e-5, clipped at 1."""
    schedule = config_for_function(schedules.wsd).set(
        peak_lr=3e-4,
        end_lr=3e-5,
        warmup_steps=0.01 * max_step,
        decay_steps=max_step // 10,
        decay="exponential",
    )
    adamw = config_for_function(adamw_optimizer).set(
        learning_rate=schedule, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.01
    )
    clip = config_for_function(transforms.clip_by_global_norm).set(max_norm=1.0)
    chain = config_for_function(transforms.chain).set(args=[clip, adamw])
    return Learner.default_config().set(optimizer=chain)


def _input(split: str, mode: InputMode) -> LMInput.Config:
    store = TokenStore.default_config().set(path="{data_dir}/dclm", split=split)
    return LMInput.default_config().set(
        source=store,
        seq_len=SEQ_LEN,
        global_batch_size=BATCH_SIZE,
        document_boundary=DocumentBoundary.CONTINUE,
        vocab_size=VOCAB_SIZE,
        mode=mode,
        seed=1234,
    )


def trainer(
    model: CausalLM.Config, *, max_step: int, save_every: int, rows_per_device: int
) -> SpmdTrainer.Config:
    """Returns the job: bfloat16 compute over float32 parameters, evenly spaced checkpoints kept.

    `rows_per_device` is how many rows a device of the published 32 computes at a time.
    """
    cfg = SpmdTrainer.default_config().set(
        model=model,
        learner=learner(max_step),
        input=_input("train", InputMode.TRAIN),
        max_step=max_step,
        train_dtype="bfloat16",
        num_microbatches=BATCH_SIZE // (32 * rows_per_device),
        mesh_shape=mesh_shape_from_axes(fsdp=-1),
    )
    policy = config_for_function(every_n_steps_and_last_policy).set(n=save_every)
    cfg.checkpointer = Checkpointer.default_config().set(save_policy=policy, keep_last_n=None)
    cfg.evalers["validation"] = SpmdEvaler.default_config().set(
        input=_input("validation", InputMode.EVALUATE).set(max_batches=25),
        eval_policy=policy.clone(),
    )
    return cfg


def tiny() -> SpmdTrainer.Config:
    """Returns a FLAME-MoE for a laptop: 4 layers of width 128, top-2 of 16 experts, 8192 tokens.

    It is made to learn within minutes on two CPU cores, from little text: small batches and a high
    rate that only falls, weights that start at the scale of their input (each layer's outputs at
    zero), a vocabulary that does much of the work, and a loop over layers, which saves the copies
    of a scan.
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
    adamw = config_for_function(adamw_optimizer).set(
        learning_rate=schedule, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1
    )
    clip = config_for_function(transforms.clip_by_global_norm).set(max_norm=1.0)
    cfg = trainer(model, max_step=700, save_every=350, rows_per_device=32)
    cfg.learner.optimizer = config_for_function(transforms.chain).set(args=[clip, adamw])
    cfg.set(train_dtype=None, mesh_shape=mesh_shape_from_axes(data=-1))
    for lm_input, rows in ((cfg.input, 8), (cfg.evalers["validation"].input, 32)):
        lm_input.set(seq_len=128, global_batch_size=rows, vocab_size=TINY_VOCAB_SIZE)
        lm_input.source.path = "{data_dir}/text"
        lm_input.document_boundary = DocumentBoundary.RESET
    cfg.evalers["validation"].input.max_batches = None
    return cfg


def _moe(size: MoESize) -> SpmdTrainer.Config:
    return trainer(
        moe_model(size),
        max_step=size.max_step,
        save_every=size.save_every,
        rows_per_device=size.rows_per_device,
    )


def _dense(size: DenseSize) -> SpmdTrainer.Config:
    return trainer(
        dense_model(size),
        max_step=size.max_step,
        save_every=size.max_step // 10,
        rows_per_device=size.rows_per_device,
    )


def named_trainer_configs() -> Mapping[str, Callable[[], SpmdTrainer.Config]]:
    """Returns the configs by name."""
    configs = {f"flame-moe-{n}": functools.partial(_moe, size) for n, size in MOE_SIZES.items()}
    configs |= {f"dense-{n}": functools.partial(_dense, size) for n, size in DENSE_SIZES.items()}
    return {**configs, "flame-moe-tiny": tiny}
