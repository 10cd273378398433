"""The how-to "swap a layer": each region is quoted in the docs, and trains here."""

import math

import jax
import jax.numpy as jnp
import optax
import pytest
from jaxtyping import Array, Float

from moelib.core.config import REQUIRED, Required, config_class, config_for_function
from moelib.core.config_modifier import replace_layer_config_recursively
from moelib.core.metrics import WeightedScalar, weighted
from moelib.core.module import Module, functional, in_context
from moelib.core.tree import Batch
from moelib.data.batches.synthetic import SyntheticInput
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.embedding import Embedding
from moelib.layers.feed_forward import FeedForward
from moelib.layers.linear import Linear
from moelib.layers.moe.balance import BiasBalancing
from moelib.layers.moe.layer import MoELayer
from moelib.layers.moe.router import Score
from moelib.layers.norm import RMSNorm
from moelib.layers.rope import RotaryEmbedding
from moelib.layers.transformer import LoopStack, ScanStack, TransformerLayer
from moelib.learner.learner import Learner
from moelib.learner.optimizers import adamw_optimizer
from moelib.models.causal_lm import CausalLM
from moelib.models.model import Model
from moelib.train.trainer import SpmdTrainer


def small_trainer() -> SpmdTrainer.Config:
    """Returns a trainer of a two-layer MoE model on a made-up language."""
    # --8<-- [start:trainer]
    moe = MoELayer.default_config().set(hidden_dim=16, num_experts=4, num_experts_per_token=2)
    layer = TransformerLayer.default_config().set(feed_forward=moe)
    layer.self_attention.num_heads = 4
    decoder = ScanStack.default_config().set(num_layers=2, block=[layer])
    model = CausalLM.default_config().set(vocab_size=32, dim=16, decoder=decoder)
    adamw = config_for_function(adamw_optimizer).set(learning_rate=0.01)
    data = SyntheticInput.default_config().set(vocab_size=32, seq_len=16, global_batch_size=16)
    learner = Learner.default_config().set(optimizer=adamw)
    cfg = SpmdTrainer.default_config().set(model=model, learner=learner, input=data, max_step=12)
    # --8<-- [end:trainer]
    return cfg


def dense(cfg: SpmdTrainer.Config) -> None:
    """Replaces every MoE layer by a dense feed-forward layer."""
    # --8<-- [start:dense]
    replace_layer_config_recursively(cfg, MoELayer, FeedForward.default_config().set(hidden_dim=32))
    # --8<-- [end:dense]


def attention(cfg: SpmdTrainer.Config) -> None:
    """Changes options of the attention layers."""
    # --8<-- [start:attention]
    attention = GroupedQueryAttention.default_config().set(
        num_heads=4,
        num_kv_heads=2,  # Two query heads share keys and values.
        qk_norm=RMSNorm.default_config(),
        rope=RotaryEmbedding.default_config().set(theta=500_000.0),
    )
    cfg.model.decoder.block[0].self_attention = attention
    # --8<-- [end:attention]


def optimizer(cfg: SpmdTrainer.Config) -> None:
    """Trains with an optimizer of Optax that moelib does not know."""
    # --8<-- [start:optimizer]
    cfg.learner.optimizer = config_for_function(optax.nadamw).set(learning_rate=0.01)
    # --8<-- [end:optimizer]


def router(cfg: SpmdTrainer.Config) -> None:
    """Routes as DeepSeek-V3 does, in a stack that is a loop."""
    # --8<-- [start:router]
    cfg.model.decoder = LoopStack.default_config().set(num_layers=2, block=cfg.model.decoder.block)
    router = cfg.model.decoder.block[0].feed_forward.router
    router.set(score=Score.SIGMOID, renormalize=True, scaling_factor=2.5)
    router.bias_balancing = BiasBalancing.default_config().set(rate=1e-3)
    # --8<-- [end:router]


@pytest.mark.parametrize(
    "change",
    [
        dense,  # Compiles fastest; named configs and old runs route as `router` does.
        *(pytest.param(c, marks=pytest.mark.slow) for c in (None, router, attention, optimizer)),
    ],
)
def test_swapped_layer_trains(change, tmp_path):
    cfg = small_trainer().set(dir=str(tmp_path), log_every_n_steps=1, checkpointer=None)
    if change is not None:
        change(cfg)
    trainer = cfg.instantiate(parent=None, devices=jax.devices()[:1])
    result = trainer.run()
    assert result["step"] == 12
    assert result["loss"] < math.log(32)  # What knowing nothing costs.
    has_experts = "experts" in str(trainer.trainer_state_specs.model)
    assert has_experts == (change is not dense)


# --8<-- [start:model]
class BagModel(Model):
    """Predicts each token from the mean of the tokens before it."""

    @config_class
    class Config(Model.Config):
        vocab_size: Required[int] = REQUIRED
        dim: Required[int] = REQUIRED
        embedding: Embedding.Config = Embedding.default_config()
        head: Linear.Config = Linear.default_config()

    def __init__(self, cfg: Config, *, parent: Module | None) -> None:
        super().__init__(cfg, parent=parent)
        sizes = {"input_dim": self.config.dim, "output_dim": self.config.vocab_size}
        vectors = {"dim": self.config.dim, "num_embeddings": self.config.vocab_size}
        self._add_child("embedding", self.config.embedding.clone(**vectors))
        self._add_child("head", self.config.head.clone(**sizes, axes=("embed", "vocab")))

    @in_context
    def logits(self, batch: Batch) -> Float[Array, "B S V"]:
        """Returns the logits of the next token at every position."""
        x = self.embedding(batch["input_ids"])
        count = jnp.arange(1, x.shape[1] + 1, dtype=x.dtype)
        return self.head(jnp.cumsum(x, axis=1) / count[None, :, None])

    def forward(self, batch: Batch) -> tuple[WeightedScalar, dict[str, WeightedScalar]]:
        """Returns the mean loss of the tokens with a label, and metrics."""
        labels, logits = batch["target_labels"], self.logits(batch)
        labels, counted = jnp.maximum(labels, 0), labels >= 0
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        num_tokens = jnp.sum(counted)
        loss = weighted(jnp.sum(losses * counted) / jnp.maximum(num_tokens, 1), num_tokens)
        return loss, {"cross_entropy": loss}


# --8<-- [end:model]


def test_a_model_of_ones_own_trains_and_gives_logits(tmp_path):
    cfg = small_trainer().set(dir=str(tmp_path), log_every_n_steps=1, checkpointer=None)
    cfg.model = BagModel.default_config().set(vocab_size=32, dim=16)
    trainer = cfg.instantiate(parent=None, devices=jax.devices()[:1])
    assert trainer.run()["loss"] < math.log(32)
    model, params = trainer.model, trainer.trainer_state.model
    batch = cfg.input.instantiate().batch(0)
    # --8<-- [start:logits]
    logits, _ = functional(model, None, params, (batch,), is_training=False, method="logits")
    # --8<-- [end:logits]
    assert logits.shape == (*batch["input_ids"].shape, 32)
