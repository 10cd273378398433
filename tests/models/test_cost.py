"""Parameters and FLOPs against published counts, counts by hand, and the compiler's."""

import jax
import jax.numpy as jnp
import pytest

from experiments import flame_moe
from moelib.core import tree
from moelib.layers.adapter import is_adapter
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.feed_forward import FeedForward
from moelib.layers.moe.balance import BiasBalancing
from moelib.layers.moe.router import Router
from moelib.layers.transformer import LoopStack, TransformerLayer
from moelib.models.causal_lm import CausalLM
from moelib.models.cost import model_cost
from moelib.train.adapters import add_adapters
from tests import tiny
from tests.layers.calling import call


def build(cfg):
    return cfg.clone(name="model").instantiate(parent=None)


def test_flops_of_the_smallest_flame_moe_are_those_counted_by_hand():
    h, dense, expert, layers, s = 256, 1368, 176, 9, 2048
    attention = layers * 4 * h * h
    scores_and_values = layers * 2 * h * (s + 1) / 2
    first = 3 * h * dense
    moe = (layers - 1) * (3 * h * expert * (6 + 2) + h * 64)
    head = h * 50_304
    want = 3 * 2 * (attention + scores_and_values + first + moe + head)
    cost = model_cost(build(flame_moe.moe_model(flame_moe.MOE_SIZES["38m-100m"])), seq_len=s)
    assert cost.train_flops_per_token == want


def dense_model(*, adapted=False, **fields):
    layer = TransformerLayer.default_config().set(
        self_attention=GroupedQueryAttention.default_config().set(num_heads=4, num_kv_heads=2),
        feed_forward=FeedForward.default_config().set(hidden_dim=512),
    )
    decoder = LoopStack.default_config().set(num_layers=2, block=[layer])
    cfg = CausalLM.default_config().set(vocab_size=512, dim=128, decoder=decoder)
    cfg.set(**fields)
    return build(add_adapters(cfg, rank=4) if adapted else cfg)


@pytest.mark.parametrize("tied", [False, True])
def test_flops_are_those_that_the_compiler_counts(tied):
    model, seq_len = dense_model(**({"lm_head": None} if tied else {})), 64
    params = jax.eval_shape(model.initialize_parameters_recursively, jax.random.key(0))
    batch = {"input_ids": jax.ShapeDtypeStruct((2, seq_len), jnp.int32)}
    run = lambda params, batch: call(model, params, batch, method="logits")
    counted = jax.jit(run).lower(params, batch).cost_analysis()["flops"] / (2 * seq_len)
    # The program computes masked scores too, all seq_len keys of a query instead of those it sees.
    masked = 2 * (2 * 2 * 128) * (seq_len - (seq_len + 1) / 2)
    ours = model.forward_flops_per_token(seq_len) + masked
    # Norms, softmax and activations are in the compiler's count only.
    assert ours < counted < 1.06 * ours


def test_flops_of_adapters_are_those_that_the_compiler_counts():
    model, seq_len, rank = dense_model(adapted=True), 64, 4
    params = jax.eval_shape(model.initialize_parameters_recursively, jax.random.key(0))
    batch = {"input_ids": jax.ShapeDtypeStruct((2, seq_len), jnp.int32)}
    trained, frozen = tree.split(params, is_adapter)

    def loss(trained, frozen, batch):
        return jnp.sum(call(model, tree.merge(trained, frozen), batch, method="logits"))

    lowered = jax.jit(jax.value_and_grad(loss)).lower(trained, frozen, batch)
    counted = lowered.cost_analysis()["flops"] / (2 * seq_len)
    masked = 3 * 2 * (2 * 2 * 128) * (seq_len - (seq_len + 1) / 2)
    # Nothing below the first projections is trained, so that their inputs have no gradient.
    inputs = 2 * 128 * (128 + 64 + 64 + 3 * rank)
    whole = model.flops_per_token(seq_len=seq_len)
    ours = whole - model.matrix_flops_per_token(lambda path: not is_adapter(path))
    assert ours + masked - inputs < counted < 1.06 * (ours + masked - inputs)
    assert ours < 0.75 * whole


def test_a_tied_head_costs_its_matmul_and_no_parameters():
    tied, untied = (model_cost(dense_model(**f), seq_len=8) for f in ({"lm_head": None}, {}))
    assert tied.train_flops_per_token == untied.train_flops_per_token
    assert untied.total_parameters - tied.total_parameters == 512 * 128
    assert untied.active_non_embedding_parameters == tied.active_non_embedding_parameters


def test_what_is_not_trained_takes_bytes_and_counts_as_no_parameter():
    router = Router.default_config().set(bias_balancing=BiasBalancing.default_config())
    with_bias = build(tiny.model_config(tiny.decoder(router=router)))
    without = build(tiny.model_config())
    a, b = (model_cost(m, seq_len=8) for m in (with_bias, without))
    assert a.total_parameters == b.total_parameters
    assert a.parameter_bytes - b.parameter_bytes == 2 * 2 * tiny.NUM_EXPERTS * 4  # Layers, arrays.


def test_bytes_follow_the_dtype_except_those_of_norms():
    full, half = (model_cost(dense_model(dtype=d), seq_len=8) for d in ("float32", "bfloat16"))
    of_norms = 5 * 128  # Two layers with two each, and the last one.
    assert full.parameter_bytes == 4 * full.total_parameters
    assert half.parameter_bytes == 2 * (half.total_parameters + of_norms)
