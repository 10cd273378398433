"""Cases: compiled functions with the FLOPs and tokens of one run.

`PlannedRouter`, or the sizes of groups, decides the routing: `learned` is that of random router
weights, `balanced` gives every expert the same number of tokens, and `skewed` gives expert i a
share proportional to 1 / (i + 1).

Shapes: T tokens, D width, F hidden width, E experts, K experts per token.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from benchmarks.sizes import Sizes
from experiments.jobs import clipped_adamw
from moelib.core.config import REQUIRED, Required, config_class
from moelib.core.module import functional
from moelib.core.precision import cast_parameters
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.attention.on_mesh import MaskSpec, attend
from moelib.layers.base import BaseLayer
from moelib.layers.moe.balance import LoadBalanceLoss
from moelib.layers.moe.dispatch import DenseDispatcher, SortedDispatcher
from moelib.layers.moe.dispatch_capacity import CapacityDispatcher
from moelib.layers.moe.dispatch_ragged import RaggedDispatcher, RingDispatcher
from moelib.layers.moe.experts import FeedForwardExperts
from moelib.layers.moe.layer import MoELayer
from moelib.layers.moe.router import Router, Routing
from moelib.layers.transformer import LoopStack, TransformerLayer
from moelib.learner.learner import Learner
from moelib.models.causal_lm import CausalLM
from moelib.models.cost import model_cost
from moelib.models.loss import language_model_loss
from moelib.parallel.sharding import named_shardings
from moelib.train.state import init_state
from moelib.train.step import make_train_step

DISPATCHERS = {
    "dense": DenseDispatcher,
    "sorted": SortedDispatcher,
    "ragged": RaggedDispatcher,
    "ring": RingDispatcher,
    "capacity": CapacityDispatcher,
}


@dataclasses.dataclass
class Case:
    """A function to measure."""

    run: Callable[[], Any]  # Starts one run, and returns arrays to wait for.
    flops: float  # FLOPs of the matmuls that a run needs, on all devices.
    tokens: int  # Tokens per run.
    compiled: jax.stages.Compiled


class PlannedRouter(Router):
    """A router with planned expert ids, and the weights of its own scores."""

    @config_class
    class Config(Router.Config):
        routing: Required[str] = REQUIRED  # learned, balanced or skewed.

    def forward(self, x: Float[Array, "B S D"], mask: Bool[Array, "B S"]) -> Routing:
        """Returns the planned routing."""
        made: Routing = super().forward(x, mask)
        cfg: PlannedRouter.Config = self.config
        if cfg.routing == "learned":
            return made
        ids = planned_ids(cfg.routing, x.shape[0] * x.shape[1], cfg)
        return made._replace(expert_ids=jnp.asarray(ids).reshape(made.expert_ids.shape))


def planned_ids(routing: str, num_tokens: int, sizes: Any) -> Int[np.ndarray, "T K"]:
    """Returns K different experts per token, balanced or skewed."""
    num_experts, k = sizes.num_experts, sizes.num_experts_per_token
    if routing == "balanced":
        return np.arange(num_tokens * k, dtype=np.int32).reshape(-1, k) % num_experts
    # The K largest of log share plus Gumbel noise are a draw without replacement.
    noise = np.random.default_rng(0).gumbel(size=(num_tokens, num_experts))
    score = noise - np.log1p(np.arange(num_experts))
    return np.argsort(-score, axis=1)[:, :k].astype(np.int32)


def model_config(sizes: Sizes, routing: str) -> CausalLM.Config:
    """Returns the model of `step`, with attention and experts in every layer."""
    moe = moe_config(sizes, routing).set(
        load_balance_loss=LoadBalanceLoss.default_config().set(weight=0.01)
    )
    attention = GroupedQueryAttention.default_config().set(
        num_heads=sizes.num_heads, num_kv_heads=sizes.num_kv_heads
    )
    layer = TransformerLayer.default_config().set(self_attention=attention, feed_forward=moe)
    decoder = LoopStack.default_config().set(num_layers=sizes.num_layers, block=[layer])
    return CausalLM.default_config().set(
        vocab_size=sizes.vocab_size, dim=sizes.dim, decoder=decoder
    )


def moe_config(sizes: Sizes, routing: str) -> MoELayer.Config:
    """Returns a layer of experts with planned routing."""
    return MoELayer.default_config().set(
        hidden_dim=sizes.hidden_dim,
        num_experts=sizes.num_experts,
        num_experts_per_token=sizes.num_experts_per_token,
        router=PlannedRouter.default_config().set(routing=routing),
    )


def learner_config() -> Learner.Config:
    """Returns AdamW with gradients clipped at a norm of 1."""
    return Learner.default_config().set(optimizer=clipped_adamw(3e-4, weight_decay=0.1))


def step_case(sizes: Sizes, routing: str) -> dict[str, Case]:
    """Returns a training step; parameters and AdamW's moments are always float32."""
    model = model_config(sizes, routing).instantiate(parent=None)
    specs = model.create_parameter_specs_recursively()
    learner = learner_config().instantiate(parent=None, param_specs=specs)
    state = init_state(model, learner, 0, None)
    batch = _random_batch(sizes)
    train_dtype = None if sizes.dtype == "float32" else sizes.dtype
    step = jax.jit(make_train_step(model, learner, train_dtype=train_dtype), donate_argnums=0)
    compiled = step.lower(state, batch).compile()
    held = [state]

    def run() -> Any:
        held[0], metrics = compiled(held[0], batch)
        return metrics.vector

    cost = model_cost(model, seq_len=sizes.seq_len)
    flops = cost.train_flops_per_token * sizes.num_tokens
    return {"step": Case(run, flops, sizes.num_tokens, compiled)}


def gmm_cases(
    sizes: Sizes, routing: str, only: Collection[str] = ("grouped", "loop")
) -> dict[str, Case]:
    """Returns grouped matmuls of experts with gradients, and one matmul per expert in a loop."""
    cfg = FeedForwardExperts.default_config().set(
        name="experts",
        num_experts=sizes.num_experts,
        num_experts_per_token=sizes.num_experts_per_token,
        input_dim=sizes.dim,
        hidden_dim=sizes.hidden_dim,
    )
    experts = cfg.instantiate(parent=None)
    params = _initial(experts, sizes)
    num_rows = sizes.num_tokens * sizes.num_experts_per_token
    rows = jax.random.normal(jax.random.key(1), (num_rows, sizes.dim), sizes.dtype)
    group_sizes = _group_sizes(sizes, routing)
    ends = np.cumsum(group_sizes)
    weights = jnp.ones(num_rows)  # Of the combination, which `loop` leaves to others.

    def grouped(params: Any, rows: Array) -> Array:
        return jnp.sum(jnp.square(experts.grouped(params, rows, jnp.asarray(group_sizes), weights)))

    def loop(params: Any, rows: Array) -> Array:
        total = jnp.zeros((), rows.dtype)
        for e, end in enumerate(ends):
            mine = jax.tree.map(lambda x, e=e: x[e : e + 1], params)
            total += jnp.sum(
                jnp.square(experts.batched(mine, rows[None, end - group_sizes[e] : end]))
            )
        return total

    flops = 3 * 2.0 * rows.shape[0] * 3 * sizes.dim * sizes.hidden_dim
    return {
        name: case(jax.grad(run, (0, 1)), (params, rows), flops, sizes.num_tokens)
        for name, run in (("grouped", grouped), ("loop", loop))
        if name in only
    }


def attention_cases(sizes: Sizes, routing: str) -> dict[str, Case]:
    """Returns causal attention with gradients, full and in a window, and JAX's own.

    The window is a quarter of the sequence.
    """
    del routing
    spec = MaskSpec((sizes.dim // sizes.num_heads) ** -0.5)
    plain = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    window = max(1, sizes.seq_len // 4)
    runs: dict[str, tuple[Callable[..., Array], int]] = {
        "attention": (functools.partial(attend, spec=spec), sizes.seq_len),
        "jax.nn": (plain, sizes.seq_len),
        "window": (functools.partial(attend, spec=spec._replace(window=window)), window),
        "jax.nn window": (functools.partial(plain, local_window_size=(window - 1, 0)), window),
    }
    return {name: attention_case(sizes, run, seen) for name, (run, seen) in runs.items()}


def attention_case(sizes: Sizes, run: Callable[..., Array], seen: int) -> Case:
    """Returns a function of queries, keys and values with its gradients.

    Each token sees `seen` tokens, itself included; the first ones see fewer.
    """
    head_dim = sizes.dim // sizes.num_heads
    keys = jax.random.split(jax.random.key(0), 3)
    heads = (sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads)
    qkv = tuple(
        jax.random.normal(key, (sizes.batch_size, sizes.seq_len, n, head_dim), sizes.dtype)
        for key, n in zip(keys, heads, strict=True)
    )
    num_scores = sizes.num_tokens * seen - sizes.batch_size * seen * (seen - 1) / 2
    flops = 3 * 2 * 2.0 * num_scores * sizes.num_heads * head_dim
    grad = jax.grad(lambda *x: jnp.sum(jnp.square(run(*x))), (0, 1, 2))
    return case(grad, qkv, flops, sizes.num_tokens)


def loss_cases(
    sizes: Sizes, routing: str, only: Collection[str] = ("loss", "all logits")
) -> dict[str, Case]:
    """Returns head and cross-entropy with gradients, in chunks and with all logits in memory."""
    del routing
    hidden = _random_tokens(sizes)
    head = jax.random.normal(jax.random.key(1), (sizes.dim, sizes.vocab_size), sizes.dtype)
    head /= sizes.dim**0.5
    labels = _random_batch(sizes)["target_labels"]

    def chunked(hidden: Array, head: Array) -> Array:
        return language_model_loss(hidden, head, labels, tied=False).objective

    def whole(hidden: Array, head: Array) -> Array:
        logits = jnp.einsum("bsd,dv->bsv", hidden, head, preferred_element_type=jnp.float32)
        logs = jax.nn.log_softmax(logits)
        return -jnp.sum(jnp.take_along_axis(logs, labels[..., None], -1))

    flops = 3 * 2.0 * sizes.num_tokens * sizes.dim * sizes.vocab_size
    return {
        name: case(jax.grad(run, (0, 1)), (hidden, head), flops, sizes.num_tokens)
        for name, run in (("loss", chunked), ("all logits", whole))
        if name in only
    }


def dispatch_cases(sizes: Sizes, routing: str) -> dict[str, Case]:
    """Returns a layer of experts with gradients for each dispatcher, over all devices."""
    x = _random_tokens(sizes)
    cases = {}
    mesh = jax.sharding.get_abstract_mesh()
    for name, dispatcher in DISPATCHERS.items():
        cfg = moe_config(sizes, routing).set(
            name="moe", input_dim=sizes.dim, dispatcher=dispatcher.default_config()
        )
        layer = cfg.instantiate(parent=None)
        params = _initial(layer, sizes)
        if mesh.shape_tuple:
            specs = layer.create_parameter_specs_recursively()
            params = jax.device_put(params, named_shardings(specs, jax.sharding.get_mesh()))

        def run(params: Any, x: Array, layer: Any = layer) -> Array:
            return jnp.sum(jnp.square(functional(layer, None, params, (x,), is_training=True)[0]))

        flops = 3 * layer.forward_flops_per_token(sizes.seq_len) * sizes.num_tokens
        cases[name] = case(jax.grad(run, (0, 1)), (params, x), flops, sizes.num_tokens)
    return cases


CASES: dict[str, Callable[[Sizes, str], dict[str, Case]]] = {
    "step": step_case,
    "gmm": gmm_cases,
    "attention": attention_cases,
    "dispatch": dispatch_cases,
    "loss": loss_cases,
}


def case(run: Callable[..., Any], arguments: tuple[Any, ...], flops: float, tokens: int) -> Case:
    """Returns the case of a function, compiled for its arguments."""
    compiled = jax.jit(run).lower(*arguments).compile()
    return Case(lambda: compiled(*arguments), flops, tokens, compiled)


def _initial(layer: BaseLayer, sizes: Sizes) -> Any:
    """Returns a layer's parameters; those that a step does not cast stay float32."""
    params = layer.initialize_parameters_recursively(jax.random.key(1))
    return cast_parameters(params, layer.create_parameter_specs_recursively(), sizes.dtype)


def _random_tokens(sizes: Sizes) -> Float[Array, "B S D"]:
    shape = (sizes.batch_size, sizes.seq_len, sizes.dim)
    return jax.random.normal(jax.random.key(0), shape, sizes.dtype)


def _group_sizes(sizes: Sizes, routing: str) -> Int[np.ndarray, "E"]:
    """Returns the number of rows of each expert."""
    if routing == "learned":
        weight = np.random.default_rng(1).normal(size=(sizes.dim, sizes.num_experts))
        x = np.random.default_rng(2).normal(size=(sizes.num_tokens, sizes.dim))
        ids = np.argsort(-x @ weight, axis=1)[:, : sizes.num_experts_per_token]
    else:
        ids = planned_ids(routing, sizes.num_tokens, sizes)
    return np.bincount(ids.reshape(-1), minlength=sizes.num_experts).astype(np.int32)


def _random_batch(sizes: Sizes) -> dict[str, Any]:
    shape = (sizes.batch_size, sizes.seq_len)
    ids = np.random.default_rng(0).integers(0, sizes.vocab_size, shape).astype(np.int32)
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    return jax.device_put(
        {
            "input_ids": ids,
            "target_labels": np.roll(ids, -1, 1),
            "segment_ids": np.ones_like(ids),
            "positions": positions,
        }
    )
