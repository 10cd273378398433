"""The examples of docs/write_a_config.md."""

import jax
import pytest
from jaxtyping import Array, Float

from experiments import flame_moe
from moelib import launch
from moelib.core.config import (
    REQUIRED,
    Required,
    RequiredFieldMissingError,
    UnknownFieldError,
    config_class,
    config_for_function,
)
from moelib.core.config_modifier import (
    ConfigModifier,
    apply_mesh_rule,
    replace_layer_config_recursively,
)
from moelib.core.errors import UserError
from moelib.layers.base import BaseLayer
from moelib.layers.feed_forward import FeedForward
from moelib.layers.moe.layer import MoELayer
from moelib.layers.remat import remat
from moelib.layers.transformer import TransformerLayer
from moelib.learner import schedules
from moelib.learner.optimizers import adamw_optimizer
from moelib.parallel.mesh import mesh_shape_from_axes
from moelib.train.trainer import SpmdTrainer
from tests.docs import my_runs


# --8<-- [start:layer]
class Noise(BaseLayer):
    """Adds Gaussian noise to its inputs in training."""

    @config_class
    class Config(BaseLayer.Config):
        std: Required[float] = REQUIRED  # Standard deviation.
        in_evaluation: bool = False  # Whether noise is added in evaluation too.

    def forward(self, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        """Returns x plus noise."""
        cfg: Noise.Config = self.config
        if not (self.is_training or cfg.in_evaluation):
            return x
        return x + cfg.std * jax.random.normal(self.prng_key, x.shape, x.dtype)


# --8<-- [end:layer]
# --8<-- [start:modifier]
class LessMemory(ConfigModifier):
    """Recomputes activations, and computes the batch in micro-batches."""

    @config_class
    class Config(ConfigModifier.Config):
        num_microbatches: int = 2

    def __call__(self, cfg: SpmdTrainer.Config) -> SpmdTrainer.Config:
        """Returns the changed config."""
        cfg.model.decoder.remat = config_for_function(remat)
        return cfg.set(num_microbatches=self.config.num_microbatches)


# --8<-- [end:modifier]


def test_a_required_field_must_be_set():
    with pytest.raises(RequiredFieldMissingError, match=r"^std "):
        Noise.default_config().set(name="noise").instantiate(parent=None)
    with pytest.raises(UnknownFieldError, match="'std'"):
        Noise.default_config().set(sdt=0.2)  # pyrefly: ignore[unexpected-keyword]


def test_assignment_copies():
    # --8<-- [start:copies]
    layer = TransformerLayer.default_config()
    ffn = FeedForward.default_config().set(hidden_dim=64)
    layer.feed_forward = ffn  # A copy.
    ffn.hidden_dim = 128  # layer.feed_forward.hidden_dim is still 64.
    wider = ffn.clone(hidden_dim=256)  # ffn.hidden_dim is still 128.
    # --8<-- [end:copies]
    assert (layer.feed_forward.hidden_dim, ffn.hidden_dim, wider.hidden_dim) == (64, 128, 256)


def test_paths():
    cfg = flame_moe.tiny()
    # --8<-- [start:paths]
    cfg.model.decoder.block[0].feed_forward.num_experts = 8
    cfg.set_recursively("model.decoder.block[0].feed_forward.num_experts", value=8)
    size = cfg.get_recursively("model.decoder.block[0].feed_forward.num_experts")
    everything = cfg.to_flat_dict()  # {"model.vocab_size": 8192, ...}
    # --8<-- [end:paths]
    assert size == 8
    assert everything["model.vocab_size"] == 8192
    assert everything["model.decoder.block[0].feed_forward.num_experts"] == 8


def test_functions():
    cfg = flame_moe.tiny()
    # --8<-- [start:functions]
    schedule = config_for_function(schedules.cosine).set(peak_lr=1e-3, warmup_steps=100)
    cfg.learner.optimizer = config_for_function(adamw_optimizer).set(
        learning_rate=schedule, b2=0.95, weight_decay=0.1
    )
    # --8<-- [end:functions]
    assert cfg.learner.optimizer.learning_rate.peak_lr == 1e-3
    assert cfg.learner.optimizer.learning_rate.max_step is REQUIRED


def test_replacing():
    cfg = flame_moe.tiny()
    # Every MoE layer becomes a dense layer of width 512.
    dense = FeedForward.default_config().set(hidden_dim=512)
    count = replace_layer_config_recursively(cfg, MoELayer, dense)

    # Every feed-forward layer becomes twice as wide.
    replace_layer_config_recursively(
        cfg, FeedForward, lambda old: old.clone(hidden_dim=2 * old.hidden_dim)
    )
    assert count == 1
    assert cfg.model.decoder.block[0].feed_forward.hidden_dim == 1024
    assert cfg.model.decoder.first_layers[0].feed_forward.hidden_dim == 768
    with pytest.raises(UserError, match="MoELayer"):
        replace_layer_config_recursively(cfg, MoELayer, dense)


def test_mesh_rules():
    cfg = flame_moe.tiny()
    # --8<-- [start:rules]
    cfg.mesh_rules = [
        ("v5p-.*", mesh_shape_from_axes(fsdp=-1)),
        ("h100-8", LessMemory.default_config().set(num_microbatches=4)),
    ]
    # --8<-- [end:rules]
    assert launch.select_mesh(cfg.clone(), "v5p-64").mesh_shape[3] == -1
    assert launch.select_mesh(cfg.clone(), "h100-8").num_microbatches == 4
    assert apply_mesh_rule(cfg, cfg.mesh_rules[1][1]).model.decoder.remat is not None


def test_a_module_of_named_configs():
    cfg = launch.load_config("tests.docs.my_runs", "tiny-sigmoid", sets=["max_step=10"])
    assert cfg.max_step == 10
    assert cfg.model.decoder.block[0].feed_forward.router == my_runs.sigmoid().get_recursively(
        "model.decoder.block[0].feed_forward.router"
    )
