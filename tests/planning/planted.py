"""Layers of a user, each with one fault that costs time or memory, in a small model."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from moelib.core.config import REQUIRED, config_class, config_for_function
from moelib.core.metrics import weighted
from moelib.core.param import ParameterSpec
from moelib.layers.base import BaseLayer
from moelib.learner.optimizers import adamw_optimizer
from moelib.models.model import Model
from moelib.parallel.sharding import constrain
from moelib.train.trainer import SpmdTrainer
from tests import tiny

DIM, NUM_EXPERTS = 64, 4


def _spec(shape, axes):
    normal = lambda key, spec: 0.1 * jax.random.normal(key, spec.shape, spec.dtype)
    return ParameterSpec(shape, axes, "float32", initializer=normal)


class Sound(BaseLayer):
    """One matmul, everything where it belongs."""

    def _create_layer_parameter_specs(self):
        return {"weight": _spec((DIM, DIM), ("embed", "ffn"))}

    def forward(self, x):
        return x + jnp.tanh(x @ self.parameters["weight"].astype(x.dtype))


class Unsplit(Sound):
    """Gathers its activations on every device."""

    def forward(self, x):
        x = jax.lax.with_sharding_constraint(jnp.sin(x), PartitionSpec())
        return x + jnp.tanh(x @ self.parameters["weight"].astype(x.dtype))


class Dense(BaseLayer):
    """Experts by `jax.lax.ragged_dot`, which only a TPU has a kernel for."""

    @config_class
    class Config(BaseLayer.Config):
        num_experts: int = NUM_EXPERTS

    def _create_layer_parameter_specs(self):
        return {"weight": _spec((NUM_EXPERTS, DIM, DIM), ("experts", "expert_embed", None))}

    def forward(self, x):
        rows = x.reshape(-1, DIM)
        sizes = jnp.full((NUM_EXPERTS,), rows.shape[0] // NUM_EXPERTS, jnp.int32)
        weight = self.parameters["weight"].astype(x.dtype)
        return x + jax.lax.ragged_dot(rows, weight, sizes).reshape(x.shape)


class GathersExperts(Dense):
    """Gathers all experts' weights on every device."""

    def forward(self, x):
        weight = self.parameters["weight"].astype(x.dtype)
        whole = jax.lax.with_sharding_constraint(weight, PartitionSpec())
        return x + jnp.einsum("bsd,edf->bsf", x, jnp.tanh(whole))


class GathersTokens(Dense):
    """Gathers all tokens on every device, for the experts that it has."""

    def forward(self, x):
        weight = self.parameters["weight"].astype(x.dtype)
        x = jax.lax.with_sharding_constraint(jnp.sin(x), PartitionSpec())
        return x + jnp.einsum("bsd,edf->bsf", x, weight)


class SmallModel(Model):
    """Embedding, one layer, head."""

    @config_class
    class Config(BaseLayer.Config):
        layer: BaseLayer.Config = REQUIRED

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self._add_child("layer", self.config.layer)

    def _create_layer_parameter_specs(self):
        return {
            "table": _spec((32, DIM), ("vocab", "embed")),
            "head": _spec((DIM, 32), ("embed", "vocab")),
        }

    def forward(self, batch):
        axes = ("batch", "sequence", "activation_embed")
        x = constrain(self.parameters["table"][batch["input_ids"]], axes)
        x = constrain(self.layer(x), axes)
        head = constrain(self.parameters["head"], (None, None))
        logits = constrain((x @ head).astype(jnp.float32), axes)
        loss = -jnp.mean(jax.nn.log_softmax(logits)[..., 0])
        tokens = jnp.float32(batch["input_ids"].size)
        return weighted(loss, tokens), {"cross_entropy": weighted(loss, tokens)}


def trainer(directory, layer, devices, mesh_shape=(1, 1, 2, 4, 1, 1)):
    """Returns a trainer of the model with a layer; its step is of 16 rows of 16 tokens."""
    cfg = SpmdTrainer.default_config().set(
        dir=str(directory),
        max_step=2,
        mesh_shape=mesh_shape,
        input=tiny.input_config(batch_size=16),
        model=SmallModel.default_config().set(layer=layer.default_config()),
    )
    cfg.learner.optimizer = config_for_function(adamw_optimizer).set(
        learning_rate=0.02, b1=0.9, b2=0.95, eps=1e-8
    )
    return cfg.instantiate(parent=None, devices=devices)
