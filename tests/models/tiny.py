"""Language models small enough to compile in seconds, batches for them, and their gradients."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moelib.core.module import OutputCollection, functional
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.base import BaseLayer
from moelib.layers.feed_forward import FeedForward
from moelib.layers.moe.balance import LoadBalanceLoss, RouterZLoss
from moelib.layers.moe.layer import MoELayer
from moelib.layers.transformer import BaseStack, ScanStack, TransformerLayer
from moelib.models.causal_lm import CausalLM
from moelib.parallel.mesh import create_device_mesh, mesh_shape_from_axes
from tests.layers.calling import QUICK

VOCAB_SIZE, DIM, NUM_EXPERTS = 32, 16, 4
ROWS, SEQ_LEN = 8, 8


def moe(**fields: Any) -> MoELayer.Config:
    """Returns an MoE layer with a shared expert and both auxiliary losses, weighted to be felt."""
    cfg = MoELayer.default_config().set(
        hidden_dim=8,
        num_experts=NUM_EXPERTS,
        num_experts_per_token=2,
        shared_experts=FeedForward.default_config().set(hidden_dim=8),
        load_balance_loss=LoadBalanceLoss.default_config().set(weight=0.3),
        router_z_loss=RouterZLoss.default_config().set(weight=0.1),
    )
    return cfg.set(**fields)


def transformer_layer(feed_forward: BaseLayer.Config) -> TransformerLayer.Config:
    """Returns a layer with 4 query heads and 2 key and value heads."""
    attention = GroupedQueryAttention.default_config().set(num_heads=4, num_kv_heads=2)
    return TransformerLayer.default_config().set(
        self_attention=attention, feed_forward=feed_forward
    )


def decoder(stack: type[BaseStack] = ScanStack, **moe_fields: Any) -> Any:
    """Returns two MoE layers."""
    layer = transformer_layer(moe(**moe_fields))
    return stack.default_config().set(num_layers=2, block=[layer])


def model_config(decoder_cfg: BaseLayer.Config | None = None, **fields: Any) -> CausalLM.Config:
    """Returns the model around a decoder."""
    cfg = CausalLM.default_config().set(
        name="model", vocab_size=VOCAB_SIZE, dim=DIM, decoder=decoder_cfg or decoder()
    )
    return cfg.set(**fields)


def packed_batch(seed: int = 0) -> dict[str, jax.Array]:
    """Returns rows of two documents each, with 0 to 3 tokens of padding after them."""
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


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def value_and_grad(model: CausalLM, params: Any, batch: Any) -> Any:
    """Returns ((objective, (what forward returned, collection)), gradients), compiled."""
    run = functools.partial(objective, model)
    return jax.value_and_grad(run, has_aux=True)(params, batch)


def initial(model: BaseLayer, seed: int = 0, **jit_options: Any) -> Any:
    """Returns the parameters of a model or layer, made under jit."""
    init = model.initialize_parameters_recursively
    return jax.jit(init, compiler_options=QUICK, **jit_options)(jax.random.key(seed))


def mesh(**axes: int) -> jax.sharding.Mesh:
    """Returns a mesh over as many of the eight devices as its axes take."""
    shape = mesh_shape_from_axes(**axes)
    return create_device_mesh(shape, devices=jax.devices()[: int(np.prod(shape))])


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
