"""The config of a tiny MoE model, and the outcomes of its checks."""

import tempfile
from typing import Any

import jax

from moelib.layers.moe.balance import LoadBalanceLoss
from moelib.layers.transformer import LoopStack
from moelib.train.trainer import SpmdTrainer
from moelib.verify.meshes import Axes
from moelib.verify.outcome import Outcome
from moelib.verify.run import run_checks
from tests.tiny import model_config, plain_moe, stacked, trainer_config, transformer_layer


def tiny(**layer_fields: Any) -> SpmdTrainer.Config:
    """Returns a model of one layer of width 16 and four experts, with 8 x 16 tokens per batch."""
    balance = LoadBalanceLoss.default_config().set(weight=0.1)
    moe = plain_moe(load_balance_loss=balance)
    layer = transformer_layer(moe, num_heads=2, num_kv_heads=None).set(**layer_fields)
    model = model_config(stacked(layer, stack=LoopStack))
    cfg = trainer_config("unused", model=model, max_step=4, evaler=False)
    cfg.learner.optimizer.set(learning_rate=1e-2, weight_decay=0.1)
    return cfg


def outcomes(cfg: SpmdTrainer.Config, *axes: Axes, num_devices: int = 4) -> list[Outcome]:
    """Returns the outcomes of the checks on one device and these meshes."""
    with tempfile.TemporaryDirectory() as folder:
        return list(run_checks(cfg, axes, jax.devices()[:num_devices], folder))


def moe(layer: type) -> dict:
    """Returns the tiny model's MoE layer, of another class."""
    fields = dict(tiny().model.decoder.block[0].feed_forward.items())
    del fields["klass"]
    return {"feed_forward": layer.default_config().set(**fields)}
