"""The MoE layer: router > dispatch > experts > combine, plus experts shared by all tokens."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from moelib.core.config import REQUIRED, InstantiableConfig, Required, config_class
from moelib.core.config_types import PositiveInt
from moelib.core.errors import UserError
from moelib.core.param import ParameterSpec
from moelib.core.tree import Nested
from moelib.core.varying import vary
from moelib.layers.base import BaseLayer, weight_spec
from moelib.layers.linear import Linear
from moelib.layers.moe.balance import (
    BalanceScope,
    LayerLoad,
    LoadBalanceLoss,
    LoadCounter,
    PooledLoad,
    RouterZLoss,
    balance_pool,
    load_balance_loss,
    router_z_loss,
)
from moelib.layers.moe.dispatch import Assignments, DispatchContext, Dispatched
from moelib.layers.moe.dispatch_ragged import RaggedDispatcher
from moelib.layers.moe.experts import FeedForwardExperts
from moelib.layers.moe.metrics import routing_metrics
from moelib.layers.moe.placement import place
from moelib.layers.moe.recording import record_routing
from moelib.layers.moe.router import Router, Routing, check_routing
from moelib.layers.tracing import (
    EXPERT_IDS,
    EXPERT_WEIGHTS,
    ROUTER_PROBS,
    trace,
)
from moelib.parallel import sharding


class MoELayer(BaseLayer):
    """A mixture of experts, used as a feed-forward layer.

    Source: Shazeer et al., arXiv:1701.06538; shared experts: Dai et al., arXiv:2401.06066; their
    gate: Qwen2, arXiv:2407.10671; latent experts: Elango et al., arXiv:2601.18089.
    """

    @config_class
    class Config(BaseLayer.Config):
        input_dim: Required[int] = REQUIRED  # D.
        hidden_dim: Required[PositiveInt] = REQUIRED  # F, of each expert.
        # Width of the inputs and outputs of routed experts, to and from which all tokens are
        # projected; None for D, without projections.
        latent_dim: PositiveInt | None = None
        num_experts: Required[PositiveInt] = REQUIRED  # E.
        num_experts_per_token: Required[PositiveInt] = REQUIRED  # K.
        router: BaseLayer.Config = Router.default_config()  # Selects experts and their weights.
        # Moves tokens to experts and back; see moelib.layers.moe.dispatch.
        dispatcher: InstantiableConfig = RaggedDispatcher.default_config()
        experts: BaseLayer.Config = FeedForwardExperts.default_config()  # Kind of the experts.
        # A feed-forward layer that all tokens visit, with its own hidden_dim; None for none.
        shared_experts: BaseLayer.Config | None = None
        # Experts computed where the tokens are, called with (x, routing): they take assignments to
        # the ids from num_experts on, which no dispatcher sends. None for none.
        local_experts: BaseLayer.Config | None = None
        shared_gate: bool = False  # Whether sigmoid(x w) multiplies the shared experts' output.
        load_balance_loss: LoadBalanceLoss.Config | None = None  # None adds no such loss.
        router_z_loss: RouterZLoss.Config | None = None  # None adds no such loss.
        report_expert_counts: bool = False  # Whether each expert's load is a metric too.

    def __init__(self, cfg: Config, *, parent: BaseLayer | None) -> None:
        super().__init__(cfg, parent=parent)
        cfg = self.config
        sizes = {
            "input_dim": cfg.input_dim,
            "num_experts": cfg.num_experts,
            "num_experts_per_token": cfg.num_experts_per_token,
        }
        self._add_child("router", cfg.router.clone(**sizes))
        inside = {**sizes, "input_dim": cfg.latent_dim or cfg.input_dim}
        self._add_child("experts", cfg.experts.clone(hidden_dim=cfg.hidden_dim, **inside))
        if cfg.latent_dim is not None:
            self._add_latent_projections(cfg.latent_dim)
        if cfg.local_experts is not None:
            self._add_child("local_experts", cfg.local_experts.clone(**sizes))
        if cfg.shared_experts is not None:
            self._add_child("shared_experts", cfg.shared_experts.clone(input_dim=cfg.input_dim))
        elif cfg.shared_gate:
            raise UserError(
                f"{self._title()}: shared_gate=True without shared_experts; set shared_experts, or "
                "shared_gate=False."
            )
        scope = None if cfg.load_balance_loss is None else cfg.load_balance_loss.scope
        if scope is BalanceScope.ALL_LAYERS and balance_pool(self) is None:
            raise UserError(
                f"{self._title()}: load_balance_loss.scope 'all_layers' requires a stack of layers "
                "around the layer; set another scope."
            )
        if scope is BalanceScope.GLOBAL_BATCH:
            counter = LoadCounter.default_config().set(num_experts=cfg.num_experts)
            self._add_child("load_counter", counter)
        self._dispatcher = cfg.dispatcher.instantiate()

    def _add_latent_projections(self, latent_dim: int) -> None:
        dim, projection = self.config.input_dim, Linear.default_config()
        self._add_child("latent_down", projection.clone(input_dim=dim, output_dim=latent_dim))
        up = projection.clone(input_dim=latent_dim, output_dim=dim, axes=(None, "embed"))
        self._add_child("latent_up", up.set(param_init=self._initializer("output_init")))

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        cfg: MoELayer.Config = self.config
        gate = weight_spec((cfg.input_dim, 1), ("embed", None))
        return {"shared_gate": gate} if cfg.shared_gate else {}

    def forward(
        self, x: Float[Array, "B S D"], mask: Bool[Array, "B S"] | None = None
    ) -> Float[Array, "B S D"]:
        """Returns the layer's output; 0 from routed experts where the mask is False."""
        if mask is None:
            mask = jnp.ones(x.shape[:2], bool)
        routing = check_routing(self.router._title(), self.router(x, mask), x)
        is_latent = self.config.latent_dim is not None
        inputs = self.latent_down(x) if is_latent else x
        y, num_dropped = self._routed(self.parameters["experts"], inputs, routing)
        if is_latent:
            y = self.latent_up(y)
        if self.config.local_experts is not None:
            y = y + self.local_experts(x, routing)
        if self.config.shared_experts is not None:
            y = y + self._from_shared_experts(x, mask)
        self._report(routing, num_dropped)
        return y

    def _from_shared_experts(
        self, x: Float[Array, "B S D"], mask: Bool[Array, "B S"]
    ) -> Float[Array, "B S D"]:
        """Returns the shared experts' output, times their gate if there is one."""
        y = self.shared_experts(x, mask)
        if not self.config.shared_gate:
            return y
        weight = self.parameters["shared_gate"].astype(x.dtype)  # As in `operands`.
        return y * jax.nn.sigmoid(jnp.einsum("bsd,dn->bsn", x, weight))  # [B, S, 1]

    def _routed(self, params: Nested, x: Float[Array, "B S D"], routing: Routing) -> Dispatched:
        """Returns the weighted sums of the experts' outputs, and all devices' dropped count."""
        # Expert ids travel in the dtype of the weights; bfloat16 has no integers above 256.
        weights = routing.weights.astype(jnp.float32)
        assignments = Assignments(routing.expert_ids, weights, routing.mask)
        params = self.experts.operands(params, x.dtype)
        mesh = sharding.current_mesh()
        if mesh is None or mesh.size == 1:
            context = DispatchContext(self.config.num_experts)
            return self._dispatcher(self.experts, params, x, assignments, context)
        shape, title = dict(mesh.shape), self._title()
        parallel = self._dispatcher.expert_parallel
        placement = place(shape, x.shape, expert_parallel=parallel, title=title)
        context = DispatchContext(self.config.num_experts, placement.experts, placement.sequence)
        specs = self.experts.create_parameter_specs_recursively()
        splits = sharding.partition_specs(specs, shape, prefix=f"{title}: experts/")
        splits, params = placement.at_use(self.experts.with_adapters(splits), params)

        def on_each_device(params: Nested, x: Array, assignments: Assignments) -> Dispatched:
            params = placement.gathered(splits, params, self.experts.added_once)
            x, assignments = vary((x, assignments), placement.axes)
            y, num_dropped = self._dispatcher(self.experts, params, x, assignments, context)
            return Dispatched(placement.summed(y), placement.counted(num_dropped))

        return jax.shard_map(
            on_each_device,
            in_specs=(splits, placement.tokens, placement.tokens),
            out_specs=Dispatched(*placement.outputs),
        )(params, x, assignments)

    def _report(self, routing: Routing, num_dropped: Array) -> None:
        """Adds the auxiliary losses and the metrics of the routing."""
        cfg: MoELayer.Config = self.config
        record_routing(self, routing)
        trace(self, ROUTER_PROBS, lambda: routing.probs)
        trace(self, EXPERT_IDS, lambda: routing.expert_ids)
        trace(self, EXPERT_WEIGHTS, lambda: routing.weights)
        metrics = routing_metrics(routing, num_dropped)
        if not cfg.report_expert_counts:
            del metrics["expert_counts"]
        for name, value in metrics.items():
            self.add_summary(name, value, per_element=name == "expert_counts")
        # The mask may hide more than padding, as that of multi-token prediction does.
        num_tokens = jnp.sum(routing.mask, dtype=jnp.float32)
        if cfg.load_balance_loss is not None:
            self._add_balance_loss(routing, cfg.load_balance_loss, num_tokens)
        if cfg.router_z_loss is not None:
            loss, weight = router_z_loss(routing.logits, routing.mask), cfg.router_z_loss.weight
            self.add_aux_loss("router_z_loss", loss, weight=weight, num_tokens=num_tokens)

    def _add_balance_loss(
        self, routing: Routing, cfg: LoadBalanceLoss.Config, num_tokens: Array
    ) -> None:
        """Adds the load-balance loss, or outputs the load, for the loss of all layers."""
        probs, ids, mask = routing.probs, routing.expert_ids, routing.mask
        if cfg.scope is BalanceScope.ALL_LAYERS:
            load = LayerLoad.of(probs, ids, mask).summed()
            weight = jnp.asarray(cfg.weight, jnp.float32)
            self.add_module_output("balance_load", PooledLoad(load, weight))
            return
        earlier = None
        if cfg.scope is BalanceScope.GLOBAL_BATCH:
            earlier = self.load_counter.count(ids, mask)
        loss = load_balance_loss(probs, ids, mask, cfg.scope, earlier)
        self.add_aux_loss("load_balance_loss", loss, weight=cfg.weight, num_tokens=num_tokens)
