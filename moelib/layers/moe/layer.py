"""The MoE layer: router > dispatch > experts > combine, beside experts that every token visits."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float

from moelib.core.config import REQUIRED, InstantiableConfig, Required, config_class
from moelib.core.context import Nested
from moelib.layers.base import BaseLayer
from moelib.layers.moe.balance import (
    LoadBalanceLoss,
    RouterZLoss,
    load_balance_loss,
    router_z_loss,
)
from moelib.layers.moe.dispatch import SortedDispatcher
from moelib.layers.moe.experts import FeedForwardExperts
from moelib.layers.moe.metrics import routing_metrics
from moelib.layers.moe.router import Router, Routing
from moelib.parallel import sharding
from moelib.parallel.collectives import vary


class MoELayer(BaseLayer):
    """A mixture of experts in the place of a feed-forward layer.

    Source: Shazeer et al., arXiv:1701.06538; shared experts: Dai et al., arXiv:2401.06066.
    """

    @config_class
    class Config(BaseLayer.Config):
        """Config of `MoELayer`."""

        input_dim: Required[int] = REQUIRED  # D.
        hidden_dim: Required[int] = REQUIRED  # F, of each expert.
        num_experts: Required[int] = REQUIRED  # E.
        num_experts_per_token: Required[int] = REQUIRED  # K.
        router: BaseLayer.Config = Router.default_config()
        dispatcher: InstantiableConfig = SortedDispatcher.default_config()
        experts: BaseLayer.Config = FeedForwardExperts.default_config()
        shared_experts: BaseLayer.Config | None = None  # A feed-forward layer; set its hidden_dim.
        load_balance_loss: LoadBalanceLoss.Config | None = None
        router_z_loss: RouterZLoss.Config | None = None

    def __init__(self, cfg: Config, *, parent: BaseLayer | None) -> None:
        super().__init__(cfg, parent=parent)
        cfg = self.config
        sizes = {
            "input_dim": cfg.input_dim,
            "num_experts": cfg.num_experts,
            "num_experts_per_token": cfg.num_experts_per_token,
        }
        self._add_child("router", cfg.router.clone(**sizes))
        self._add_child("experts", cfg.experts.clone(hidden_dim=cfg.hidden_dim, **sizes))
        if cfg.shared_experts is not None:
            self._add_child("shared_experts", cfg.shared_experts.clone(input_dim=cfg.input_dim))
        self._dispatcher = cfg.dispatcher.instantiate()

    def forward(
        self, x: Float[Array, "B S D"], mask: Bool[Array, "B S"] | None = None
    ) -> Float[Array, "B S D"]:
        """Returns the layer's output. Tokens where the mask is false go to no expert."""
        if mask is None:
            mask = jnp.ones(x.shape[:2], bool)
        routing: Routing = self.router(x, mask)
        y = self._routed(self.parameters["experts"], x, routing)
        if self.config.shared_experts is not None:
            y = y + self.shared_experts(x, mask)
        self._report(routing)
        return y

    def _routed(
        self, params: Nested, x: Float[Array, "B S D"], routing: Routing
    ) -> Float[Array, "B S D"]:
        """Returns the weighted sums of the experts' outputs, each device on its own tokens."""

        def local(params: Nested, x: Array, ids: Array, weights: Array, mask: Array) -> Array:
            choices = ids.shape[-1]
            y = self._dispatcher(
                self.experts,
                params,
                x.reshape(-1, x.shape[-1]),
                ids.reshape(-1, choices),
                weights.reshape(-1, choices),
                mask.reshape(-1),
            )
            return y.reshape(x.shape)

        mesh = sharding.current_mesh()
        inputs = (params, x, routing.expert_ids, routing.weights, routing.mask)
        if mesh is None or mesh.size == 1:
            return local(*inputs)
        return _on_each_device(local, dict(mesh.shape), f"tokens of {self._title()}", *inputs)

    def _report(self, routing: Routing) -> None:
        """Puts out the auxiliary losses and the metrics of the routing."""
        cfg: MoELayer.Config = self.config
        for name, value in routing_metrics(routing).items():
            self.add_summary(name, value)
        if cfg.load_balance_loss is not None:
            scope = cfg.load_balance_loss.scope
            loss = load_balance_loss(routing.probs, routing.expert_ids, routing.mask, scope)
            self.add_aux_loss("load_balance_loss", loss, weight=cfg.load_balance_loss.weight)
        if cfg.router_z_loss is not None:
            loss = router_z_loss(routing.logits, routing.mask)
            self.add_aux_loss("router_z_loss", loss, weight=cfg.router_z_loss.weight)


def _on_each_device(
    local: Any, mesh_shape: dict[str, int], place: str, params: Nested, x: Array, *routing: Array
) -> Array:
    """Runs `local` on each device's own tokens, with weights gathered but for their model split.

    What enters is split by batch and sequence; each device of the model axis computes its part of
    the hidden dimension, and the parts are summed.
    """
    tokens = sharding.partition_spec(
        ("batch", "sequence"), mesh_shape, shape=x.shape[:2], place=place
    )
    ffn = sharding.mesh_axes("ffn", mesh_shape)
    axes = (*sharding.mesh_axes("batch", mesh_shape), *sharding.mesh_axes("sequence", mesh_shape))
    specs = {
        "up": PartitionSpec(None, None, None, ffn or None),
        "down": PartitionSpec(None, ffn or None, None),
    }

    def run(params: Nested, x: Array, *routing: Array) -> Array:
        y = local(*vary((params, x, *routing), (*axes, *ffn)))
        return jax.lax.psum(y, ffn) if ffn else y

    run = jax.shard_map(run, in_specs=(specs, tokens, tokens, tokens, tokens), out_specs=tokens)
    return run(params, x, *routing)
