"""Recomputation: saved activations are not recomputed, and no gradient changes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core.config import config_for_function
from moelib.layers.feed_forward import FeedForward
from moelib.layers.moe.layer import MoELayer
from moelib.layers.remat import REMAT_POLICIES, remat, save_activation, save_routing
from moelib.layers.transformer import LoopStack, ScanStack, TransformerLayer
from tests import tiny
from tests.layers.calling import build, call, in_module, initial, normal

B, S, D, L = 8, 8, 16, 2
X = normal(B, S, D)
POSITIONS = np.broadcast_to(np.arange(S), (B, S))
MATMULS = (
    *("attention_q", "attention_kv", "attention_context", "attention_output"),
    *("router_logits", "experts_input", "experts_up", "experts_down"),
)


@functools.cache
def stack(kind, **fields):
    moe = MoELayer.default_config().set(num_experts=4, num_experts_per_token=2, hidden_dim=8)
    layer = TransformerLayer.default_config().set(feed_forward=moe)
    layer.self_attention.set(num_heads=4, num_kv_heads=2)
    wrap = config_for_function(remat).set(**fields) if fields else None
    return build(kind.default_config(), input_dim=D, num_layers=L, block=[layer], remat=wrap)


def gradients(made, params, x):
    loss = lambda params, x: jnp.mean(jnp.square(call(made, params, x, positions=POSITIONS)))
    return jax.grad(loss, (0, 1))(params, x)


@functools.partial(jax.jit, static_argnums=0)
def compiled(made, params, x):
    return gradients(made, params, x)


@functools.cache
def program(made):
    """Returns the program of the gradients."""
    params = jax.eval_shape(lambda: initial(made))
    return str(jax.make_jaxpr(functools.partial(gradients, made))(params, X))


def count(made, name="dot_general"):
    """Returns how often a primitive occurs in the program of the gradients."""
    text = program(made)
    return text.count(f" {name}[") + text.count(f"={name}[")


@pytest.mark.parametrize("policy", [None, *REMAT_POLICIES])
def test_every_remat_policy_gives_the_gradient(policy):
    run = remat(policy)(lambda x: jnp.sin(x) ** 2)
    np.testing.assert_allclose(jax.grad(run)(0.3), np.sin(0.6), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "keep", "mesh", "atol"),
    [
        (ScanStack, (), {}, 1e-6),
        (ScanStack, MATMULS, {}, 1e-6),
        (LoopStack, ("attention_context", "experts_up"), {}, 1e-6),
        (ScanStack, MATMULS, {"expert": 2, "model": 2, "seq": 2}, 1e-5),
    ],
)
def test_saved_names_change_no_gradient(kind, keep, mesh, atol):
    params = initial(stack(kind))
    want = compiled(stack(kind), params, X)
    with jax.set_mesh(tiny.mesh(**mesh)):
        got = jax.device_get(compiled(stack(kind, keep=keep), params, X))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=atol), got, want)


@pytest.mark.slow
def test_each_name_spares_the_backward_pass_its_matmul():
    nothing, everything = count(stack(ScanStack, keep=())), count(stack(ScanStack))
    assert nothing > everything
    for name in ("attention_q", "attention_kv", "router_logits"):
        assert count(stack(ScanStack, keep=(name,))) == nothing - 1, name
    # The attention's loop over blocks of queries has two matmuls.
    assert count(stack(ScanStack, keep=("attention_context",))) == nothing - 2
    assert count(stack(ScanStack, keep=MATMULS)) == everything


def test_the_last_matmul_of_experts_is_not_recomputed():
    assert count(stack(ScanStack, keep=("experts_down",))) == count(stack(ScanStack, keep=()))


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"keep": ()}, {"policy": "nothing_saveable"}])
def test_the_routing_is_never_recomputed(fields):
    for name in ("sort", "top_k"):
        assert count(stack(ScanStack, **fields), name) == count(stack(ScanStack), name) > 0


def test_the_routing_is_saved_in_one_dimension():
    text = str(jax.make_jaxpr(remat()(save_routing))(jnp.zeros((8, 2))))
    assert "f32[16] = name[name=routing]" in text
    for shape in ((), (3,), (2, 8), (2, 8, 3)):
        x = jnp.asarray(normal(*shape))
        np.testing.assert_array_equal(save_routing(x), x)


def test_offloaded_activations_are_in_the_memory_of_the_host():
    made = stack(ScanStack, keep=("attention_q",), offload=("attention_context",))
    assert "<host>" in program(made)


@functools.cache
def stack_with_first_layer(kind, **fields):
    """Returns a stack of a dense layer and two MoE layers."""
    cfg = stack(kind, **fields).config.clone(num_layers=L + 1)
    dense = cfg.block[0].clone(feed_forward=FeedForward.default_config().set(hidden_dim=8))
    return build(cfg, first_layers=[dense])


def forward(made):
    """Returns the program of the forward pass."""
    params = jax.eval_shape(lambda: initial(made))
    run = lambda params, x: call(made, params, x, positions=POSITIONS)
    return str(jax.make_jaxpr(run)(params, X))


@pytest.mark.parametrize(("kind", "num_blocks"), [(LoopStack, 1 + L), (ScanStack, 1 + 1)])
def test_first_layers_are_recomputed_too(kind, num_blocks):
    made = stack_with_first_layer(kind, keep=("feed_forward_up", "experts_up"))
    assert forward(made).count(" remat2[") == num_blocks


def test_a_name_that_neither_first_layers_nor_blocks_have_is_refused():
    made = stack_with_first_layer(ScanStack, keep=("feed_forward_up", "expert_up"))
    with pytest.raises(ValueError, match=r"'expert_up'.*'experts_up'"):
        forward(made)


def test_names_of_an_inner_block_count_for_the_outer_one():
    inner = remat(keep=["a"])(lambda x: save_activation(jnp.sin(x), "a"))
    outer = remat(keep=["a", "b"])(lambda x: save_activation(inner(x) ** 2, "b"))
    np.testing.assert_allclose(jax.grad(in_module(outer))(0.3), np.sin(0.6), rtol=1e-6)


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match=r"'dots'.*dots_saveable"):
        remat("dots")
    with pytest.raises(ValueError, match="'save_only_these_names'"):
        remat("save_only_these_names")  # It builds a policy.
    with pytest.raises(ValueError, match="'dots_saveable'"):
        remat("dots_saveable", keep=["a"])
    with pytest.raises(ValueError, match="remat: a "):
        remat(keep=["a"], offload=["a", "b"])
