"""The config of a tiny MoE model, and the outcomes of its checks."""

import tempfile
from typing import Any

import jax

from moelib.core.config import config_for_function
from moelib.data.synthetic import SyntheticInput
from moelib.layers.moe.balance import LoadBalanceLoss
from moelib.layers.moe.layer import MoELayer
from moelib.layers.transformer import LoopStack, TransformerLayer
from moelib.learner.learner import Learner
from moelib.learner.optimizers import adamw_optimizer
from moelib.models.causal_lm import CausalLM
from moelib.train.trainer import SpmdTrainer
from moelib.verify.meshes import Axes
from moelib.verify.outcome import Outcome
from moelib.verify.run import run_checks

VOCAB_SIZE = 32


def tiny(**layer_fields: Any) -> SpmdTrainer.Config:
    """Returns a model of one layer of width 16 and four experts, with 8 x 16 tokens per batch."""
    moe = MoELayer.default_config().set(
        hidden_dim=8,
        num_experts=4,
        num_experts_per_token=2,
        load_balance_loss=LoadBalanceLoss.default_config().set(weight=0.1),
    )
    layer = TransformerLayer.default_config().set(feed_forward=moe)
    layer.self_attention.set(num_heads=2)
    layer.set(**layer_fields)
    decoder = LoopStack.default_config().set(num_layers=1, block=[layer])
    return SpmdTrainer.default_config().set(
        name="trainer",
        dir="unused",
        model=CausalLM.default_config().set(vocab_size=VOCAB_SIZE, dim=16, decoder=decoder),
        learner=Learner.default_config().set(
            optimizer=config_for_function(adamw_optimizer).set(
                learning_rate=1e-2, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1
            )
        ),
        input=SyntheticInput.default_config().set(
            vocab_size=VOCAB_SIZE, seq_len=16, global_batch_size=8
        ),
        max_step=4,
    )


def outcomes(cfg: SpmdTrainer.Config, *axes: Axes, num_devices: int = 4) -> list[Outcome]:
    """Returns the outcomes of the checks on one device and these meshes."""
    with tempfile.TemporaryDirectory() as folder:
        return list(run_checks(cfg, axes, jax.devices()[:num_devices], folder))
