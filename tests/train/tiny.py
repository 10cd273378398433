"""A small model that has everything a trainer must carry, and its trainer."""

import json
import os

import jax
import jax.numpy as jnp

from moelib.core.config import config_class, config_for_function
from moelib.core.metrics import weighted
from moelib.core.param import ParameterSpec
from moelib.data.lm_input import InputMode
from moelib.data.synthetic import SyntheticInput
from moelib.layers.base import BaseLayer
from moelib.learner.optimizers import adamw_optimizer
from moelib.train.evaler import SpmdEvaler
from moelib.train.trainer import SpmdTrainer


class TinyModel(BaseLayer):
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
        self.add_summary("logits_max", jnp.max(logits))
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
    cfg.source.set(num_documents=64, max_document_tokens=40)
    return cfg


def trainer_config(
    directory, *, max_step=8, save_every=4, mesh_shape=(1, -1, 1, 1, 1, 1), evaler=True
):
    cfg = SpmdTrainer.default_config().set(
        name="tiny",
        dir=str(directory),
        max_step=max_step,
        mesh_shape=mesh_shape,
        log_every_n_steps=1,
        input=input_config(),
        model=TinyModel.default_config(),
    )
    cfg.learner.optimizer = config_for_function(adamw_optimizer).set(
        learning_rate=0.02, b1=0.9, b2=0.95, eps=1e-8
    )
    cfg.checkpointer.save_policy.n = save_every
    if evaler:
        cfg.evalers["val"] = SpmdEvaler.default_config().set(
            input=input_config(mode=InputMode.EVALUATE, seed=1).set(max_batches=2)
        )
    cfg.evalers.get("val") and cfg.evalers["val"].eval_policy.set(n=save_every)
    return cfg


def losses(directory):
    """Returns {step: loss} of a run's metrics."""
    with open(os.path.join(directory, "metrics.jsonl"), encoding="utf-8") as lines:
        values = [json.loads(line) for line in lines]
    return {value["step"]: value["loss"] for value in values if "loss" in value}
