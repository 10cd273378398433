"""Six correct configs with layers of a user's own, and one bug of each."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from moelib.core.config import config_class, config_for_function
from moelib.kernels import quantized_matmul
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.base import BaseLayer, bias_spec, weight_spec
from moelib.layers.external import ExternalLayer
from moelib.layers.feed_forward import FeedForward
from moelib.layers.moe.balance import LoadBalanceLoss
from moelib.layers.quantization import Quantization
from moelib.layers.remat import remat
from moelib.learner.optimizers import lion_optimizer
from moelib.parallel.pipeline.schedule import Schedule
from moelib.tasks.run import task_trainer_config
from moelib.tasks.task import Task
from moelib.train import pipeline as pipeline_module
from moelib.train import step as step_module
from moelib.train.trainer import SpmdTrainer
from tests.layers.test_external import equinox_mlp
from tests.tiny import model_config, plain_moe, stacked, trainer_config
from tests.tiny import transformer_layer as layer
from tests.verify.bugs import replaces


def trainer(*block: BaseLayer.Config, num_layers: int, **fields: Any) -> SpmdTrainer.Config:
    """Returns a trainer of a stack of layers."""
    model = model_config(stacked(*block, num_layers=num_layers, **fields))
    return trainer_config("unused", model=model, max_step=4, evaler=False)


def balanced_moe(**fields: Any) -> BaseLayer.Config:
    """Returns a layer of experts with a balance loss."""
    return layer(
        plain_moe(load_balance_loss=LoadBalanceLoss.default_config().set(weight=0.3), **fields)
    )


# -- State of a layer in a pipeline ----------------------------------------------------------------


class Centered(FeedForward):
    """Subtracts a moving average of its inputs, which it keeps itself."""

    def _create_layer_parameter_specs(self) -> dict[str, Any]:
        average = bias_spec((self.config.input_dim,), (None,), trainable=False)
        return {**super()._create_layer_parameter_specs(), "average": average}

    def forward(self, x: Any, mask: Any = None) -> Any:
        kept = mask[..., None].astype(x.dtype)
        mean = jnp.sum(x * kept, (0, 1)) / jnp.maximum(jnp.sum(kept), 1.0)
        average = self.parameters["average"]
        if self.is_training:
            self.add_state_update("average", 0.9 * average + 0.1 * jax.lax.stop_gradient(mean))
        return super().forward(x - average.astype(x.dtype)[None, None], mask)


def pipeline() -> SpmdTrainer.Config:
    """Returns ZB-V over blocks of a layer with a moving average and a layer of experts."""
    own = layer(Centered.default_config().set(hidden_dim=24))
    cfg = trainer(own, balanced_moe(), num_layers=8)
    return cfg.set(num_microbatches=4, pipeline_schedule=Schedule.ZB_V)


@replaces(pipeline_module, "run_pipeline", "update: feed_forward/average", pipeline)
def updates_of_stages_are_dropped(known, functions, layout, blocks, fixed, *rest, **options):
    done = known(functions, layout, blocks, fixed, *rest, **options)
    return done._replace(fixed=fixed)


# -- An auxiliary loss of a layer, and a layer of another library ----------------------------------


class SharpAttention(GroupedQueryAttention):
    """Attention with a loss of its own, over tokens."""

    def forward(self, x: Any, *, positions: Any, segment_ids: Any = None) -> Any:
        y = super().forward(x, positions=positions, segment_ids=segment_ids)
        kept = (segment_ids > 0).astype(jnp.float32)
        total = jnp.sum(jnp.mean(jnp.square(y.astype(jnp.float32)), -1) * kept)
        self.add_aux_loss("size", total / jnp.maximum(jnp.sum(kept), 1.0), weight=0.2)
        return y


def mixed() -> SpmdTrainer.Config:
    """Returns own attention, a layer of Equinox and one of experts, with Lion and averages."""
    attention = SharpAttention.default_config().set(num_heads=4, num_kv_heads=1)
    external = ExternalLayer.default_config().set(functions=config_for_function(equinox_mlp))
    external.functions.set(hidden_dim=24)
    block = layer().set(self_attention=attention), layer(external), balanced_moe()
    cfg = trainer(*block, num_layers=6, remat=config_for_function(remat))
    cfg.learner.optimizer = config_for_function(lion_optimizer).set(learning_rate=1e-3)
    cfg.learner.ema.decay = 0.9
    return cfg.set(num_microbatches=2)


@replaces(step_module, "_shares", "plain: objective", mixed)
def auxiliary_losses_weighted_by_labels(known, *args):
    of_loss, _ = known(*args)
    return of_loss, of_loss


# -- 8 bits ----------------------------------------------------------------------------------------


def fp8() -> SpmdTrainer.Config:
    """Returns two layers of eight experts, whose matmuls are in 8 bits."""
    cfg = trainer(balanced_moe(num_experts=8, hidden_dim=16), num_layers=2)
    cfg.model.quantization = Quantization.FP8_BLOCK
    return cfg


@replaces(quantized_matmul, "gmm_input_gradient", "quantized: experts/up", fp8)
def gradients_of_rows_too_large(known, *args, **options):
    return 1.2 * known(*args, **options)


# -- A loop over a weight --------------------------------------------------------------------------


class Spectral(BaseLayer):
    """A linear layer whose matrix is divided by its largest singular value."""

    @config_class
    class Config(BaseLayer.Config):
        input_dim: int = 16

    def _create_layer_parameter_specs(self) -> dict[str, Any]:
        dim = self.config.input_dim
        return {"weight": weight_spec((dim, dim), ("embed", None))}

    def forward(self, x: Any, mask: Any = None) -> Any:
        del mask
        weight = self.parameters["weight"].astype(x.dtype)
        unit = lambda v: v / jnp.linalg.norm(v)
        first = unit(jnp.ones(weight.shape[0], x.dtype))
        v = jax.lax.fori_loop(0, 4, lambda _, v: unit(weight @ (weight.T @ v)), first)
        return self._scaled(x @ weight, 1 / jnp.linalg.norm(weight.T @ v))

    def _scaled(self, y: Any, factor: Any) -> Any:
        return y * factor


def loop() -> SpmdTrainer.Config:
    """Returns layers with power iteration, which are recomputed."""
    return trainer(layer(Spectral.default_config()), num_layers=2, remat=config_for_function(remat))


@replaces(Spectral, "_scaled", "derivatives: decoder/layer1/feed_forward/weight", loop)
def gradient_three_times(known, self, y, factor):
    scaled = jax.custom_vjp(lambda y, factor: known(self, y, factor))
    forward = lambda y, factor: (scaled(y, factor), factor)
    scaled.defvjp(forward, lambda factor, grad: (3 * grad * factor, jnp.zeros_like(factor)))
    return scaled(y, factor)


# -- A mask ----------------------------------------------------------------------------------------


class LocalAttention(BaseLayer):
    """Attention of one head to the last tokens of the document."""

    @config_class
    class Config(BaseLayer.Config):
        input_dim: int = 16
        window: int = 5

    def _create_layer_parameter_specs(self) -> dict[str, Any]:
        dim = self.config.input_dim
        return {name: weight_spec((dim, dim), ("embed", None)) for name in ("qk", "vo")}

    def forward(self, x: Any, *, positions: Any, segment_ids: Any = None) -> Any:
        qk, vo = (self.parameters[name].astype(x.dtype) for name in ("qk", "vo"))
        scores = jnp.einsum("bsd,de,bte->bst", x, qk, x) / x.shape[-1] ** 0.5
        seen = self._seen(positions[:, :, None] - positions[:, None])
        seen &= segment_ids[:, :, None] == segment_ids[:, None]
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), -1)
        return jnp.einsum("bst,bte->bse", weights, x @ vo)

    def _seen(self, distance: Any) -> Any:
        return (distance >= 0) & (distance < self.config.window)


def window() -> SpmdTrainer.Config:
    """Returns layers with own attention."""
    return trainer(layer().set(self_attention=LocalAttention.default_config()), num_layers=2)


@replaces(LocalAttention, "_seen", "causality: loss of tokens", window)
def causal_mask_is_forgotten(known, self, distance):
    return known(self, jnp.abs(distance))


# -- A loss over the batch -------------------------------------------------------------------------


def init_towers(key: jax.Array) -> dict[str, jax.Array]:
    """Returns the matrices of two towers."""
    keys = jax.random.split(key)
    return {name: jax.random.normal(key, (6, 4)) for name, key in zip("ab", keys, strict=True)}


def contrastive_loss(params: Any, batch: Any, key: Any, is_training: bool) -> Any:
    """Returns the cross-entropy of each pair among all pairs of the batch."""
    del key, is_training
    a, b = (jnp.tanh(batch[name] @ params[name]) for name in "ab")
    losses = optax.softmax_cross_entropy_with_integer_labels(a @ b.T, jnp.arange(len(a)))
    return losses.mean()


def pairs(count: int) -> list[dict[str, np.ndarray]]:
    """Returns examples."""
    rng = np.random.default_rng(0)
    return [
        {name: rng.standard_normal(6).astype(np.float32) for name in "ab"} for _ in range(count)
    ]


def two_towers() -> SpmdTrainer.Config:
    """Returns a task with a contrastive loss on eight devices, evaluated on 43 examples."""
    return task_trainer_config(
        Task.default_config().set(init=init_towers, loss=contrastive_loss),
        pairs(64),
        eval_examples=pairs(43),
        optimizer=optax.adam(1e-2),
        batch_size=16,
        max_step=8,
        mesh="data=8",
    )


@replaces(sys.modules[__name__], "contrastive_loss", "loss: loss", two_towers)
def negatives_of_each_device(known, params, batch, key, is_training):
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return known(params, batch, key, is_training)
    of_device = lambda batch: jax.lax.pmean(known(params, batch, key, is_training), "data")
    return jax.shard_map(of_device, in_specs=jax.P("data"), out_specs=jax.P())(batch)


BUGS = {
    updates_of_stages_are_dropped: "pipeline=2,fsdp=2",
    auxiliary_losses_weighted_by_labels: "data=2,expert=2",
    gradients_of_rows_too_large: "expert=2,fsdp=2",
    gradient_three_times: "fsdp=2,model=2",
    causal_mask_is_forgotten: "data=4",
    negatives_of_each_device: "data=8",
}
