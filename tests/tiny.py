"""The small models, batches and trainers that tests share.

`TinyModel` is a module of its own with every kind of state that a trainer carries; `model_config`
gives a `CausalLM` of MoE layers, and `dense_model` one of dense layers.
"""

import functools
import json
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moelib.core.config import InstantiableConfig, config_class, config_for_function
from moelib.core.context import OutputCollection
from moelib.core.metrics import maximum, weighted
from moelib.core.module import functional
from moelib.core.param import ParameterSpec
from moelib.data.batches.lm_input import InputMode
from moelib.data.batches.synthetic import SyntheticInput, SyntheticTokens
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.base import BaseLayer
from moelib.layers.feed_forward import FeedForward
from moelib.layers.moe.balance import LoadBalanceLoss, RouterZLoss
from moelib.layers.moe.layer import MoELayer
from moelib.layers.transformer import BaseStack, ScanStack, TransformerLayer
from moelib.learner.optimizers import adamw_optimizer
from moelib.models.causal_lm import CausalLM
from moelib.models.model import Model
from moelib.parallel.mesh import create_device_mesh, mesh_shape_from_axes
from moelib.train.evaler import SpmdEvaler
from moelib.train.trainer import SpmdTrainer
from tests.layers import calling

VOCAB_SIZE, DIM, NUM_EXPERTS = 32, 16, 4
ROWS, SEQ_LEN = 8, 8


# -- Models --------------------------------------------------------------------------------------


def plain_moe(**fields: Any) -> MoELayer.Config:
    """Returns an MoE layer of 4 experts, top-2, without auxiliary losses."""
    cfg = MoELayer.default_config().set(
        hidden_dim=8, num_experts=NUM_EXPERTS, num_experts_per_token=2
    )
    return cfg.set(**fields)


def moe(**fields: Any) -> MoELayer.Config:
    """Returns an MoE layer with a shared expert and both auxiliary losses, of large weights."""
    cfg = plain_moe(
        shared_experts=FeedForward.default_config().set(hidden_dim=8),
        load_balance_loss=LoadBalanceLoss.default_config().set(weight=0.3),
        router_z_loss=RouterZLoss.default_config().set(weight=0.1),
    )
    return cfg.set(**fields)


def transformer_layer(
    feed_forward: BaseLayer.Config | None = None, **attention: Any
) -> TransformerLayer.Config:
    """Returns a layer with 4 query heads, 2 key and value heads and a dense feed-forward layer."""
    fields = {"num_heads": 4, "num_kv_heads": 2} | attention
    return TransformerLayer.default_config().set(
        self_attention=GroupedQueryAttention.default_config().set(**fields),
        feed_forward=feed_forward or FeedForward.default_config().set(hidden_dim=16),
    )


def stacked(
    *block: BaseLayer.Config, stack: type[BaseStack] = ScanStack, num_layers: int = 1, **fields: Any
) -> Any:
    """Returns a stack of layers."""
    return stack.default_config().set(num_layers=num_layers, block=list(block), **fields)


def decoder(stack: type[BaseStack] = ScanStack, **moe_fields: Any) -> Any:
    """Returns two MoE layers."""
    return stacked(transformer_layer(moe(**moe_fields)), stack=stack, num_layers=2)


def model_config(decoder_cfg: BaseLayer.Config | None = None, **fields: Any) -> CausalLM.Config:
    """Returns the model around a decoder."""
    cfg = CausalLM.default_config().set(
        name="model", vocab_size=VOCAB_SIZE, dim=DIM, decoder=decoder_cfg or decoder()
    )
    return cfg.set(**fields)


def dense_model(vocab_size: int, *, num_layers: int = 1, **fields: Any) -> CausalLM.Config:
    """Returns a model of dense layers with two heads."""
    layer = transformer_layer(num_heads=2, num_kv_heads=None)
    return model_config(stacked(layer, num_layers=num_layers), vocab_size=vocab_size, **fields)


def packed_batch(seed: int = 0) -> dict[str, jax.Array]:
    """Returns sequences of two documents each, with 0 to 3 tokens of padding at the end."""
    rng = np.random.default_rng(seed)
    shape = (ROWS, SEQ_LEN)
    ids = rng.integers(0, VOCAB_SIZE, shape)
    index = np.broadcast_to(np.arange(SEQ_LEN), shape)
    second = rng.integers(2, SEQ_LEN // 2 + 1, (ROWS, 1))  # Where the second document begins.
    end = SEQ_LEN - np.arange(ROWS)[:, None] % 4
    segments = np.where(index < second, 1, np.where(index < end, 2, 0))
    labels = np.where((segments > 0) & (rng.random(shape) < 0.9), np.roll(ids, -1, 1), -1)
    batch = {
        "input_ids": ids,
        "target_labels": labels,
        "segment_ids": segments,
        "positions": np.where(index < second, index, index - second),
    }
    return {name: jnp.asarray(value, jnp.int32) for name, value in batch.items()}


def objective(
    model: CausalLM, params: Any, batch: Any
) -> tuple[jax.Array, tuple[Any, OutputCollection]]:
    """Returns (loss + auxiliary losses, (what forward returned, what layers put out))."""
    result, outputs = functional(model, jax.random.key(1), params, (batch,), is_training=True)
    return result[0].mean + outputs.total_aux_loss(), (result, outputs)


@functools.partial(jax.jit, static_argnums=0)
def value_and_grad(model: CausalLM, params: Any, batch: Any) -> Any:
    """Returns ((objective, (what forward returned, collection)), gradients), compiled."""
    run = functools.partial(objective, model)
    return jax.value_and_grad(run, has_aux=True)(params, batch)


def mesh(**axes: int) -> jax.sharding.Mesh:
    """Returns a mesh over as many of the eight devices as its axes take."""
    shape = mesh_shape_from_axes(**axes)
    return create_device_mesh(shape, devices=jax.devices()[: int(np.prod(shape))])


initial = calling.initial  # Of models, too.


def assert_trees_equal(got: Any, want: Any) -> None:
    """Asserts that trees have the same structure and values."""
    jax.tree.map(np.testing.assert_array_equal, got, want)


def assert_trees_close(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    """Asserts that leaves agree to a part of their own largest entry (or of 1e-3, if smaller)."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    flat = jax.tree_util.tree_flatten_with_path(want)[0]
    for (path, expected), actual in zip(flat, jax.tree.leaves(got), strict=True):
        expected, actual = np.asarray(expected, np.float64), np.asarray(actual, np.float64)
        scale = max(float(np.max(np.abs(expected), initial=0.0)), 1e-3)
        np.testing.assert_allclose(
            actual, expected, rtol=0, atol=tolerance * scale, err_msg=jax.tree_util.keystr(path)
        )


# -- Trainers ------------------------------------------------------------------------------------


class TinyModel(Model):
    """Embedding, dropout, head; an auxiliary loss, and a count that it keeps itself."""

    @config_class
    class Config(BaseLayer.Config):
        vocab_size: int = 32
        dim: int = 16
        dropout: float = 0.1
        aux_weight: float = 0.01
        nan_at: int | None = None  # The step, from 1, whose loss is NaN.

    def _create_layer_parameter_specs(self):
        cfg = self.config
        zeros = lambda key, spec: jnp.zeros(spec.shape, spec.dtype)
        normal = lambda key, spec: 0.1 * jax.random.normal(key, spec.shape, spec.dtype)
        return {
            "table": ParameterSpec(
                (cfg.vocab_size, cfg.dim), ("vocab", "embed"), initializer=normal
            ),
            "head": ParameterSpec(
                (cfg.dim, cfg.vocab_size), ("embed", "vocab"), initializer=normal
            ),
            "steps": ParameterSpec((), (), "float32", initializer=zeros, trainable=False),
            "passes": ParameterSpec((), (), "float32", initializer=zeros, trainable=False),
        }

    def _end_step(self, params):
        return {**params, "steps": params["steps"] + 1}

    def forward(self, batch):
        cfg, params = self.config, self.parameters
        x = params["table"][batch["input_ids"]]
        if self.is_training and cfg.dropout:
            keep = jax.random.bernoulli(self.prng_key, 1 - cfg.dropout, x.shape)
            x = x * keep.astype(x.dtype)
        logits = (x @ params["head"]).astype(jnp.float32)
        labels = batch["target_labels"]
        valid = (labels >= 0).astype(jnp.float32)
        picked = jnp.take_along_axis(
            jax.nn.log_softmax(logits), jnp.maximum(labels, 0)[..., None], axis=-1
        )[..., 0]
        tokens = jnp.sum(valid)
        loss = -jnp.sum(picked * valid) / jnp.maximum(tokens, 1.0)
        if cfg.nan_at is not None:
            loss = loss * jnp.where(params["steps"] + 1 == cfg.nan_at, jnp.nan, 1.0)
        self.add_aux_loss("logits_square", jnp.mean(jnp.square(logits)), weight=cfg.aux_weight)
        self.add_summary("logits_max", maximum(jnp.max(logits)))
        if self.is_training:
            self.add_state_update("passes", params["passes"] + 1)
        return weighted(loss, tokens), {"cross_entropy": weighted(loss, tokens)}

    def flops_per_token(self, *, seq_len):
        del seq_len
        return 6.0 * self.config.dim * self.config.vocab_size


def input_config(*, batch_size=8, seq_len=16, mode=InputMode.TRAIN, seed=0):
    cfg = SyntheticInput.default_config().set(
        global_batch_size=batch_size, seq_len=seq_len, vocab_size=32, mode=mode, seed=seed
    )
    cfg.source = SyntheticTokens.default_config().set(num_documents=64, max_document_tokens=40)
    return cfg


def trainer_config(
    directory,
    *,
    model: InstantiableConfig | None = None,
    max_step=8,
    save_every=4,
    mesh_shape=(1, -1, 1, 1, 1, 1),
    evaler=True,
):
    """Returns a trainer of a model, by default a `TinyModel`, on a synthetic language."""
    cfg = SpmdTrainer.default_config().set(
        name="tiny",
        dir=str(directory),
        max_step=max_step,
        mesh_shape=mesh_shape,
        log_every_n_steps=1,
        input=input_config(),
        model=model or TinyModel.default_config(),
    )
    cfg.learner.optimizer = config_for_function(adamw_optimizer).set(
        learning_rate=0.02, b1=0.9, b2=0.95, eps=1e-8
    )
    cfg.checkpointer.save_policy.n = save_every
    if evaler:
        cfg.evalers["val"] = SpmdEvaler.default_config().set(
            input=input_config(mode=InputMode.EVALUATE, seed=1).set(max_batches=2)
        )
        cfg.evalers["val"].eval_policy.set(n=save_every)
    return cfg


def after_each_step(trainer, act):
    """Calls `act` with the metrics of each step of a trainer, before its loop has them."""
    run_step = trainer.run_step

    def step(batch, **options):
        metrics = run_step(batch, **options)
        act(metrics)
        return metrics

    trainer.run_step = step


def losses(directory):
    """Returns {step: loss} of a run's metrics."""
    with open(os.path.join(directory, "metrics.jsonl"), encoding="utf-8") as lines:
        values = [json.loads(line) for line in lines]
    return {value["step"]: value["loss"] for value in values if "loss" in value}
