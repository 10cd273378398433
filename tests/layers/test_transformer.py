"""Transformer layers and stacks: loop, scan and remat are one function; costs; errors."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core.config import UnknownFieldError, config_class, config_for_function
from moelib.core.errors import UserError
from moelib.core.module import functional
from moelib.core.param import is_spec
from moelib.layers.base import BaseLayer
from moelib.layers.feed_forward import FeedForward
from moelib.layers.moe.balance import BalanceScope, BiasBalancing, LoadBalanceLoss
from moelib.layers.moe.dispatch import DenseDispatcher
from moelib.layers.moe.router import Router
from moelib.layers.norm import LayerNorm
from moelib.layers.remat import remat
from moelib.layers.transformer import LoopStack, ScanStack
from tests import tiny
from tests.layers.calling import build, call, call_and_collect, float64, initial, normal

B, S, D, L = 2, 6, tiny.DIM, 5
X = jnp.asarray(normal(B, S, D))
POSITIONS = jnp.broadcast_to(jnp.arange(S)[None], (B, S))
MASK = jnp.asarray([[True] * 6, [True] * 4 + [False] * 2])


class Noise(BaseLayer):
    """A feed-forward layer that adds noise: each layer must have a key of its own."""

    @config_class
    class Config(BaseLayer.Config):
        input_dim: int = D

    def forward(self, x, mask=None):
        del mask
        return 0.1 * jax.random.normal(self.prng_key, x.shape, x.dtype)


class Odd(Noise):
    """A feed-forward layer whose output is no residual."""

    @config_class
    class Config(Noise.Config):
        result: str = ""

    def forward(self, x, mask=None) -> Any:
        results = {"broadcast": x[..., :1], "narrow": x[..., :3], "dict": {"y": x}, "None": None}
        return results[self.config.result]


@pytest.mark.parametrize(
    ("result", "given"),
    [
        ("broadcast", r"float32\[2, 6, 1\]"),
        ("narrow", r"float32\[2, 6, 3\]"),
        ("dict", "{"),
        ("None", "N"),
    ],
)
def test_an_output_that_is_no_residual_names_the_layer(result, given):
    made = build(tiny.transformer_layer(Odd.default_config().set(result=result)).set(input_dim=D))
    with pytest.raises(UserError, match=rf"feed_forward returned {given}.* shape \[2, 6, {D}\]"):
        call(made, initial(made), X, positions=POSITIONS)


def layers(dispatcher=None):
    """Returns (a dense layer, an MoE layer with losses and state, a layer of noise)."""
    dense = FeedForward.default_config().set(hidden_dim=12)
    router = Router.default_config().set(bias_balancing=BiasBalancing.default_config())
    moe = tiny.moe(router=router, dispatcher=dispatcher or DenseDispatcher.default_config())
    feed_forwards = (dense, moe, Noise.default_config())
    return tuple(tiny.transformer_layer(feed_forward) for feed_forward in feed_forwards)


@functools.cache
def stack(kind, with_remat=False):
    first, moe, noisy = layers()
    wrap = config_for_function(remat) if with_remat else None
    cfg = kind.default_config().set(
        input_dim=D, num_layers=L, first_layers=[first], block=[moe, noisy], remat=wrap
    )
    return build(cfg)


def as_scan(tree):
    """Returns a LoopStack's tree (parameters, gradients, outputs) in the layout of a ScanStack."""
    stacked = {
        f"repeated{j}": jax.tree.map(
            lambda *xs: jnp.asarray(np.stack(xs)), *(tree[f"layer{i}"] for i in range(1 + j, L, 2))
        )
        for j in (0, 1)
        if f"layer{1 + j}" in tree
    }
    first = {"layer0": tree["layer0"]} if "layer0" in tree else {}
    return {**first, **stacked}


@functools.cache
def parameters():
    init = stack(LoopStack).initialize_parameters_recursively
    return jax.jit(init)(jax.random.key(0))


def objective(made, params, x):
    y, outputs = functional(
        made,
        jax.random.key(1),
        params,
        {"x": x, "positions": POSITIONS, "mask": MASK},
        is_training=True,
    )
    return jnp.mean(jnp.square(y)) + outputs.total_aux_loss(), (y, outputs)


@functools.cache
def results(kind, with_remat=False):
    """Returns ((objective, (output, collection)), gradients in parameters and x)."""
    run = jax.value_and_grad(functools.partial(objective, stack(kind, with_remat)), (0, 1), True)
    params = parameters() if kind is LoopStack else as_scan(parameters())
    return jax.jit(run)(params, X)


def test_loop_and_scan_start_with_the_same_values():
    made = tiny.initial(stack(ScanStack))
    tiny.assert_trees_close(made, as_scan(parameters()), 2e-7)


def test_specs_are_those_of_the_values_and_stacked_along_layers():
    specs = stack(ScanStack).create_parameter_specs_recursively()
    shapes = jax.tree.map(lambda x: (x.shape, str(x.dtype)), as_scan(parameters()))
    assert jax.tree.map(lambda s: (s.shape, s.dtype), specs) == shapes
    up = specs["repeated0"]["feed_forward"]["experts"]["up"]
    assert up.axes == ("layers", "experts", None, "expert_embed", "expert_ffn")
    assert up.fans() == (D, 8)


def test_caches_are_those_of_a_loops_layers_stacked():
    loop, scan = (
        stack(kind).create_cache_specs_recursively(2, 32) for kind in (LoopStack, ScanStack)
    )
    zeros = lambda specs: jax.tree.map(lambda s: jnp.zeros(s.shape), specs, is_leaf=is_spec)
    want = jax.tree.map(jnp.shape, as_scan(zeros(loop)))
    assert jax.tree.map(jnp.shape, zeros(scan)) == want
    cache = scan["repeated1"]["self_attention"]["cache"]
    assert cache["k"].shape == (2, 2, 2, 32, D // 4)
    assert cache["k"].axes == ("layers", "batch", "kv_heads", None, "head_dim")
    assert scan["layer0"].keys() == {"self_attention"}  # No other layer has a cache.


def test_loop_equals_scan_in_output_losses_and_every_gradient():
    (loop, (loop_y, loop_out)), (loop_grads, loop_x) = results(LoopStack)
    (scan, (scan_y, scan_out)), (scan_grads, scan_x) = results(ScanStack)
    tiny.assert_trees_close((scan, scan_y, scan_x), (loop, loop_y, loop_x))
    tiny.assert_trees_close(scan_grads, as_scan(loop_grads))
    for mine, theirs in zip(scan_out, loop_out, strict=True):
        tiny.assert_trees_close(mine, as_scan(theirs))


@pytest.mark.parametrize("kind", [pytest.param(LoopStack, marks=pytest.mark.slow), ScanStack])
def test_remat_changes_nothing(kind):
    tiny.assert_trees_close(results(kind, True), results(kind), 1e-6)


@pytest.mark.parametrize(
    ("kind", "with_remat"), [(LoopStack, False), (ScanStack, False), (ScanStack, True)]
)
def test_auxiliary_losses_of_every_layer_reach_the_objective(kind, with_remat):
    (total, (y, outputs)), _ = results(kind, with_remat)
    losses = jax.tree.leaves(outputs.aux_losses, is_leaf=lambda x: hasattr(x, "weight"))
    values = np.concatenate([np.ravel(loss.value * loss.weight) for loss in losses])
    assert len(values) == 2 * 2  # Two losses in each of the two MoE layers.
    assert (values > 0.05).all()
    np.testing.assert_allclose(total - jnp.mean(jnp.square(y)), values.sum(), rtol=1e-4)


@pytest.mark.parametrize("kind", [LoopStack, ScanStack])
def test_steps_end_in_every_layer(kind):
    params = parameters() if kind is LoopStack else as_scan(parameters())

    def busy(path, x):
        return x.at[..., 0].set(4.0) if path[-1].key == "counts" else x

    after = stack(kind).end_step_recursively(jax.tree_util.tree_map_with_path(busy, params))
    biases = [
        value
        for path, value in jax.tree_util.tree_flatten_with_path(after)[0]
        if path[-1].key == "bias"
    ]
    assert sum(b.size for b in biases) == 2 * tiny.NUM_EXPERTS
    for bias in biases:
        np.testing.assert_allclose(bias[..., 0], -1e-3, rtol=1e-5)
        np.testing.assert_allclose(bias[..., 1:], 1e-3, rtol=1e-5)
    assert jax.tree.structure(after) == jax.tree.structure(params)


def test_counts_are_those_of_all_layers():
    loop, scan = stack(LoopStack), stack(ScanStack)
    first, moe, noisy = (build(cfg, input_dim=D) for cfg in layers())
    want = first.active_parameters() + 2 * (moe.active_parameters() + noisy.active_parameters())
    assert loop.active_parameters() == scan.active_parameters() == want
    flops = [made.forward_flops_per_token(S) for made in (first, moe, noisy)]
    want = flops[0] + 2 * (flops[1] + flops[2])
    assert loop.forward_flops_per_token(S) == scan.forward_flops_per_token(S) == want


@pytest.mark.parametrize("kind", [LoopStack, ScanStack])
def test_a_stack_may_have_first_layers_only(kind):
    made = build(kind.default_config(), input_dim=D, num_layers=1, first_layers=[layers()[0]])
    params = initial(made)
    want = call(build(layers()[0], input_dim=D), params["layer0"], x=X, positions=POSITIONS)
    np.testing.assert_array_equal(call(made, params, x=X, positions=POSITIONS), want)


def test_a_scan_takes_prebuilt_values():
    made = stack(ScanStack)
    scales = np.arange(2 * D, dtype=np.float32).reshape(2, D)
    prebuilt = {"repeated0": {"attention_norm": {"scale": scales}}}
    init = functools.partial(made.initialize_parameters_recursively, prebuilt=prebuilt)
    got = jax.jit(init)(jax.random.key(0))
    np.testing.assert_array_equal(got["repeated0"]["attention_norm"]["scale"], scales)
    other = got["repeated0"]["self_attention"]
    tiny.assert_trees_close(other, as_scan(parameters())["repeated0"]["self_attention"], 2e-7)
    with pytest.raises(ValueError, match="'repeated2'"):
        made.initialize_parameters_recursively(jax.random.key(0), prebuilt={"repeated2": {}})


def test_a_layer_adds_attention_and_feed_forward_to_the_stream():
    cfg = layers()[0].set(norm=LayerNorm.default_config())
    made = build(cfg, input_dim=D)
    params = initial(made)
    part = lambda name, *args, **kw: call(made.children[name], params[name], *args, **kw)
    x = X + part("self_attention", part("attention_norm", X), positions=POSITIONS)
    want = x + part("feed_forward", part("feed_forward_norm", x))
    got = call(made, params, x=X, positions=POSITIONS, mask=MASK)
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert not np.allclose(float64(got), float64(X))


def test_outputs_are_normalized_and_scaled_before_they_are_added():
    norm = LayerNorm.default_config()
    cfg = layers()[0].set(norm=None, output_norm=norm, residual_scale=0.25)
    made = build(cfg, input_dim=D)
    params = initial(made)
    assert params.keys() == {
        *("self_attention", "attention_output_norm"),
        *("feed_forward", "feed_forward_output_norm"),
    }
    part = lambda name, *args, **kw: call(made.children[name], params[name], *args, **kw)
    y = part("self_attention", X, positions=POSITIONS)
    x = X + 0.25 * part("attention_output_norm", y)
    want = x + 0.25 * part("feed_forward_output_norm", part("feed_forward", x))
    got = call(made, params, x=X, positions=POSITIONS, mask=MASK)
    np.testing.assert_allclose(got, want, atol=1e-6)


def one_part_each():
    """Returns the two layers that have the two parts of a layer."""
    both = layers()[0]
    return [both.clone(feed_forward=None), both.clone(self_attention=None)]


@pytest.mark.parametrize("kind", [LoopStack, ScanStack])
def test_two_layers_of_one_part_are_one_layer_of_both(kind):
    cfg = kind.default_config().set(input_dim=D)
    apart = build(cfg, block=one_part_each(), num_layers=4, remat=config_for_function(remat))
    whole = build(cfg, block=[layers()[0]], num_layers=2)
    params = initial(whole)
    mixers = {"layer0": "layer0", "layer1": "layer2", "repeated0": "repeated0"}
    others = {"layer0": "layer1", "layer1": "layer3", "repeated0": "repeated1"}
    split = {}
    for name, layer in params.items():
        split[mixers[name]] = {n: layer[n] for n in ("attention_norm", "self_attention")}
        split[others[name]] = {n: layer[n] for n in ("feed_forward_norm", "feed_forward")}
    assert jax.tree.structure(initial(apart)) == jax.tree.structure(split)
    run = jax.jit(jax.value_and_grad(objective, (1, 2), has_aux=True), static_argnums=0)
    (got, _), (grads, grad_x) = run(apart, split, X)
    (want, _), (want_grads, want_x) = run(whole, params, X)
    tiny.assert_trees_close((got, grad_x), (want, want_x))
    for name, layer in want_grads.items():
        tiny.assert_trees_close({**grads[mixers[name]], **grads[others[name]]}, layer)
    assert apart.active_parameters() == whole.active_parameters()
    assert apart.forward_flops_per_token(S) == whole.forward_flops_per_token(S)
    caches = apart.create_cache_specs_recursively(2, 32)
    assert caches.keys() == {mixers[name] for name in params}


def test_a_layer_without_parts_is_refused():
    cfg = layers()[0].set(self_attention=None, feed_forward=None)
    with pytest.raises(ValueError, match="self_attention=None and feed_forward=None"):
        build(cfg, input_dim=D)


class WithoutInputDim(BaseLayer):
    """A layer that does not declare the size that its parent sets."""

    def forward(self, x, mask=None):
        del mask
        return x


def test_a_layer_without_the_size_that_its_parent_sets_is_named_by_its_path():
    cfg = ScanStack.default_config().set(num_layers=1, block=[layers()[0]])
    cfg.block[0].feed_forward = WithoutInputDim.default_config()
    with pytest.raises(UnknownFieldError, match=r"block\[0\]\.feed_forward: .*'input_dim'"):
        build(cfg, input_dim=D)


def test_one_balance_loss_of_all_layers_is_the_same_for_loop_and_scan():
    balance = LoadBalanceLoss.default_config().set(weight=0.5, scope=BalanceScope.ALL_LAYERS)
    dispatcher = DenseDispatcher.default_config()
    moe = tiny.plain_moe(load_balance_loss=balance, dispatcher=dispatcher)
    losses = []
    for kind in (LoopStack, ScanStack):
        stacked = tiny.stacked(moe, stack=kind, num_layers=3, first_layers=[moe], input_dim=D)
        made = build(stacked)
        _, outputs = call_and_collect(made, initial(made), x=X, mask=MASK)
        assert outputs.aux_losses.keys() == {"load_balance_loss"}
        losses.append(outputs.aux_losses["load_balance_loss"])
    np.testing.assert_allclose(*losses, rtol=1e-6)
    assert losses[0].weight == 0.5


def test_a_balance_loss_of_all_layers_requires_a_stack_and_one_number_of_experts():
    scope = BalanceScope.ALL_LAYERS
    balance = LoadBalanceLoss.default_config().set(weight=1.0, scope=scope)
    moe = tiny.plain_moe(load_balance_loss=balance)
    with pytest.raises(ValueError, match=r"layer: load_balance_loss\.scope 'all_layers'"):
        build(moe, input_dim=D)
    block = moe, moe.clone(num_experts=2)
    made = build(tiny.stacked(*block, stack=ScanStack, num_layers=2, input_dim=D))
    with pytest.raises(ValueError, match=f"num_experts 2 and {tiny.NUM_EXPERTS}"):
        jax.eval_shape(lambda: call(made, initial(made), x=X, mask=MASK))
