"""Layers and parts with one bug each, of a kind that trains and is found months later."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from moelib.checkpoint.checkpointer import Checkpointer
from moelib.core import tree
from moelib.core.config import REQUIRED, Required, config_class
from moelib.core.config_modifier import ConfigModifier
from moelib.core.module import functional
from moelib.core.param import FanAxes, ParameterSpec
from moelib.layers.base import BaseLayer, bias_spec
from moelib.layers.feed_forward import FeedForward
from moelib.layers.moe.balance import LoadBalanceLoss, load_balance_loss, router_z_loss
from moelib.layers.moe.experts import FeedForwardExperts
from moelib.layers.moe.layer import MoELayer
from moelib.layers.transformer import LoopStack
from moelib.learner.learner import Learner
from moelib.train import step as step_module
from moelib.train.state import TrainerState

BATCH = ("data", "expert", "fsdp")


def alone() -> bool:
    """Returns whether there is one device."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.empty or mesh.size == 1


class SumOverTheWrongAxis(BaseLayer):
    """A feed-forward layer whose parts of the hidden dimension are summed over another axis."""

    @config_class
    class Config(BaseLayer.Config):
        input_dim: Required[int] = REQUIRED
        hidden_dim: int = 24

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        sizes = self.config.input_dim, self.config.hidden_dim
        return {
            "up": ParameterSpec(sizes, ("embed", "ffn"), fan_axes=FanAxes((0,), (1,))),
            "down": ParameterSpec(sizes[::-1], ("ffn", "embed"), fan_axes=FanAxes((0,), (1,))),
        }

    def forward(self, x: Any, mask: Any = None) -> Any:
        del mask

        def run(x: Any, up: Any, down: Any) -> Any:
            y = jax.nn.relu(x @ up) @ down
            return y if alone() else jax.lax.psum(y, "seq")

        weights = self.parameters["up"], self.parameters["down"]
        if alone():
            return run(x, *weights)
        return jax.shard_map(
            run,
            in_specs=(P(BATCH), P(None, "model"), P("model", None)),
            out_specs=P(BATCH),
            check_vma=False,
        )(x, *weights)


class ExpertsWithLargerGradients(FeedForwardExperts):
    """Experts whose gradient is summed over devices that have it already."""

    def grouped(self, params: Any, rows: Any, group_sizes: Any, weights: Any) -> Any:
        times = jax.sharding.get_abstract_mesh().shape.get("expert", 1)
        scale = lambda p: times * p - jax.lax.stop_gradient((times - 1) * p)
        return super().grouped(jax.tree.map(scale, params), rows, group_sizes, weights)


class BalancedOnEachDevice(MoELayer):
    """The balance loss of each device's own tokens, averaged."""

    def _report(self, routing: Any, num_dropped: Any) -> None:
        del num_dropped
        loss = load_balance_loss
        if not alone():

            def loss(*parts: Any) -> Any:
                return jax.lax.pmean(load_balance_loss(*parts), BATCH)

            loss = jax.shard_map(loss, in_specs=P(BATCH), out_specs=P(), check_vma=False)
        value = loss(routing.probs, routing.expert_ids, routing.mask)
        self.add_aux_loss("load_balance_loss", value, weight=0.1)


class BalancedTwice(MoELayer):
    """The balance loss with twice its weight."""

    def _report(self, routing: Any, num_dropped: Any) -> None:
        del num_dropped
        weight = 2 * self.config.load_balance_loss.weight
        value = load_balance_loss(routing.probs, routing.expert_ids, routing.mask)
        self.add_aux_loss("load_balance_loss", value, weight=weight)


class WithALossOfItsOwn(MoELayer):
    """No bug: a loss in addition to those of the library, with another name than its field."""

    @config_class
    class Config(MoELayer.Config):
        confidence_loss: LoadBalanceLoss.Config = LoadBalanceLoss.default_config().set(weight=0.1)

    def _report(self, routing: Any, num_dropped: Any) -> None:
        super()._report(routing, num_dropped)
        weight = self.config.confidence_loss.weight
        self.add_aux_loss("own", router_z_loss(routing.logits, routing.mask), weight=weight)


class LayersWithoutTheirLosses(LoopStack):
    """A stack that runs its layers separately, and drops their outputs."""

    def forward(self, x: Any, **side_inputs: Any) -> Any:
        for name, layer in self.children.items():
            x, _ = functional(
                layer,
                None,
                self.parameters[name],
                {"x": x, **side_inputs},
                is_training=self.is_training,
                drop_output_collections=("aux_losses",),
            )
        return x


class InItsOwnDtype(FeedForward):
    """No bug: a layer that computes in another dtype than that of its input."""

    @config_class
    class Config(FeedForward.Config):
        compute_dtype: str = "bfloat16"

    def forward(self, x: Any, mask: Any = None) -> Any:
        return super().forward(x.astype(self.config.compute_dtype), mask).astype(x.dtype)


class PaddingAsTokens(MoELayer):
    """Sends padding to experts too."""

    def forward(self, x: Any, mask: Any = None) -> Any:
        del mask
        return super().forward(x, None)


def same_for_all_experts() -> Any:
    """Returns an initializer that draws one expert and copies it."""

    def init(key: Any, spec: ParameterSpec) -> Any:
        one = 0.1 * jax.random.normal(key, spec.shape[1:])
        return jnp.broadcast_to(one, spec.shape)

    return init


class BrokenRule(ConfigModifier):
    """A mesh rule that raises."""

    def __call__(self, cfg: Any) -> Any:
        raise ValueError("this mesh rule is broken")


class OneRanksExperts(Checkpointer):
    """Writes the experts of the first device for all."""

    def save(self, state: Any, run: Any) -> None:
        def first(path: str, x: Any) -> Any:
            if "/experts/" not in path:
                return x
            part = np.asarray(x.addressable_shards[0].data)
            copies = [n // size for n, size in zip(x.shape, part.shape, strict=True)]
            return jax.device_put(np.tile(part, copies), x.sharding)

        named = lambda path, x: first(tree.path_string(path), x)
        super().save(jax.tree_util.tree_map_with_path(named, state), run)


def moments_that_a_mesh_forgets(patch: Any) -> None:
    """On meshes, each update begins with an optimizer state of zeros."""
    known = Learner._step

    def step(self: Any, params: Any, gradients: Any, state: Any, **rest: Any) -> Any:
        if not alone():
            state = state._replace(optimizer=jax.tree.map(jnp.zeros_like, state.optimizer))
        return known(self, params, gradients, state, **rest)

    patch(Learner, "_step", step)


def learner_state_that_a_step_on_a_mesh_loses(patch: Any) -> None:
    """On meshes, the step returns zeros as the learner's state."""

    def state(step: Any, prng_key: Any, params: Any, learner: Any) -> Any:
        kept = learner if alone() else jax.tree.map(jnp.zeros_like, learner)
        return TrainerState(step, prng_key, params, kept)

    patch(step_module, "TrainerState", state)


class CountsAndMixes(FeedForward):
    """No bug: counts its tokens, and adds the mean of a sequence's tokens by design."""

    mixes_documents = True

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        count = bias_spec((), (), dtype="float32", trainable=False)
        return {**super()._create_layer_parameter_specs(), "count": count}

    def forward(self, x: Any, mask: Any = None) -> Any:
        kept = jnp.ones(x.shape[:2], bool) if mask is None else mask
        weight = kept[..., None].astype(x.dtype)
        mean = jnp.sum(x * weight, 1, keepdims=True) / jnp.maximum(
            jnp.sum(weight, 1, keepdims=True), 1.0
        )
        tokens = jnp.sum(kept, dtype=jnp.float32)
        self.add_state_update("count", self.parameters["count"] + tokens)
        return super().forward(x, mask) + mean
