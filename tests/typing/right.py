"""Right uses of configs: type checkers find nothing here."""

from typing import assert_type

import jax.numpy as jnp

import moelib
from moelib.checkpoint.checkpointer import Checkpointer
from moelib.core.config import REQUIRED, Required, config_class, config_for_function
from moelib.layers.base import BaseLayer
from moelib.layers.feed_forward import FeedForward
from moelib.layers.initializers import normal
from moelib.models.causal_lm import CausalLM
from moelib.train.trainer import SpmdTrainer
from moelib.train.watchers.bad_steps import BadSteps


def half(x: int) -> float:
    """Returns a function's result, whose type its config knows."""
    return x / 2


class Ffn(BaseLayer):
    """A layer of a user's own."""

    @config_class
    class Config(BaseLayer.Config):
        input_dim: Required[int] = REQUIRED
        act: str = "silu"
        inner: BaseLayer.Config = FeedForward.default_config()

    def forward(self) -> int:
        return self.config.input_dim


class Renamed(Ffn):
    """Borrows the Config of Ffn."""


cfg = Ffn.default_config().set(name="ffn", input_dim=8, dtype=jnp.bfloat16)
cfg.set(param_init=config_for_function(normal).set(std=0.02))
assert_type(cfg, Ffn.Config)
assert_type(Renamed.default_config(), Ffn.Config)
assert_type(cfg.clone(input_dim=4).input_dim, int)
assert_type(Ffn.Config(act="gelu").act, str)
assert_type(CausalLM.default_config().set(vocab_size=8).vocab_size, int)
trainer = SpmdTrainer.default_config().set(max_step=10, watchers={"bad": BadSteps.default_config()})
assert_type(trainer.checkpointer, Checkpointer.Config | None)
assert_type(config_for_function(half).set(x=3).instantiate(), float)
assert_type(moelib.fit(trainer, trainer_dir="runs/a").step, int)
cfg.inner.clone(hidden_dim=3)  # A field for any layer takes the fields of every layer.
