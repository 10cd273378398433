"""Both parts of a backward pass compute what `jax.vjp` does, and no product twice."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core.jaxpr import walk
from moelib.core.module import functional
from moelib.kernels.backend import use_backends
from moelib.parallel.pipeline.backward_split import split_backward
from tests.tiny import (
    assert_trees_close,
    initial,
    mesh,
    model_config,
    moe,
    packed_batch,
    stacked,
    transformer_layer,
)


def layer(params, x, scale):
    """A feed-forward layer, recomputed, and an auxiliary loss."""
    inner = lambda up, x: jnp.tanh(x @ up)
    hidden = jax.checkpoint(inner)(params["up"], x)
    y = x + jax.jit(lambda a, b: a @ b)(hidden, params["down"]) * scale
    return y, jnp.mean(y**2)


def count_products(fn, *args) -> int:
    jaxpr = jax.make_jaxpr(fn)(*args)
    return sum(site.eqn.primitive.name == "dot_general" for site in walk(jaxpr))


def test_both_parts_equal_the_whole():
    keys = jax.random.split(jax.random.key(0), 4)
    params = {"up": jax.random.normal(keys[0], (4, 8)), "down": jax.random.normal(keys[1], (8, 4))}
    x, dy = jax.random.normal(keys[2], (3, 4)), jax.random.normal(keys[3], (3, 4))
    gradients = dy, jnp.ones(())
    split = split_backward(layer, params, x, 0.5)
    dx, kept = split.of_input(params, x, (0.5,), gradients)
    _, vjp = jax.vjp(lambda params, x: layer(params, x, 0.5), params, x)
    want = vjp(gradients)
    np.testing.assert_allclose(dx, want[1], rtol=1e-6)
    got = split.of_weights(params, kept)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want[0])
    shapes = [(a.shape, a.dtype) for a in kept]
    assert shapes == [(s.shape, s.dtype) for s in split.kept]
    # Forward: up, down; recomputed: up; gradients of the inputs of both.
    assert count_products(split.of_input, params, x, (0.5,), gradients) == 5
    assert count_products(split.of_weights, params, kept) == 2


def test_parameters_without_a_gradient_have_zeros():
    params = {"used": jnp.ones((2, 2)), "unused": jnp.ones(3)}
    split = split_backward(lambda params, x: x @ params["used"], params, jnp.ones((2, 2)))
    x = jnp.ones((2, 2))
    _, kept = split.of_input(params, x, (), x)
    np.testing.assert_array_equal(split.of_weights(params, kept)["unused"], np.zeros(3))


def test_a_loop_over_layers_is_split():
    keys = jax.random.split(jax.random.key(0), 6)
    params = {
        "scale": jax.random.normal(keys[5], (3, 4)),
        "up": jax.random.normal(keys[0], (3, 4, 8)),
        "down": jax.random.normal(keys[1], (3, 8, 4)),
        "all": jax.random.normal(keys[4], (4,)),
    }
    x, dy = jax.random.normal(keys[2], (3, 4)), jax.random.normal(keys[3], (3, 4))

    def layers(params, x, scale):
        def body(carry, own):
            x, total = carry
            y, loss = layer(own, x * own["scale"][None] * params["all"][None], scale)
            return (y, total + loss), None

        own = {name: params[name] for name in ("up", "down", "scale")}
        return jax.lax.scan(body, (x, 0.0), own)[0]

    gradients = dy, jnp.ones(())
    split = split_backward(layers, params, x, 0.1)
    dx, kept = split.of_input(params, x, (0.1,), gradients)
    want = jax.vjp(lambda params, x: layers(params, x, 0.1), params, x)[1](gradients)
    np.testing.assert_allclose(dx, want[1], rtol=1e-5)
    got = split.of_weights(params, kept)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want[0])
    assert count_products(split.of_input, params, x, (0.1,), gradients) == 5
    assert count_products(split.of_weights, params, kept) == 2
    # The inputs of both products and the gradients of their outputs; gradients of vectors.
    sizes = sorted(each.size for each in split.kept)
    assert sizes == [4, 3 * 4, 3 * 3 * 4, 3 * 3 * 4, 3 * 3 * 8, 3 * 3 * 8]


def test_a_shard_map_is_split():
    def mapped(params, x):
        def local(weight, x):
            weight = jax.lax.all_gather(weight, "data", tiled=True)  # Repeated instead of kept.
            hidden = jnp.tanh(x @ weight.T)
            own = jnp.mean(hidden)  # A scalar, different on each device.
            return jnp.sin(own * hidden) @ weight, jax.lax.pmean(own, "data")

        split = jax.P("data")
        return jax.shard_map(local, in_specs=(split, split), out_specs=(split, jax.P()))(params, x)

    keys = jax.random.split(jax.random.key(0), 3)
    weight, x, dy = (jax.random.normal(key, (8, 4)) for key in keys)
    gradients = dy, jnp.float32(2)
    with jax.set_mesh(mesh(data=2)):
        split = split_backward(mapped, weight, x)
        dx, kept = jax.jit(split.of_input)(weight, x, (), gradients)
        got = jax.jit(split.of_weights)(weight, kept)
        want = jax.jit(lambda *args: jax.vjp(mapped, *args)[1](gradients))(weight, x)
        assert count_products(split.of_input, weight, x, (), gradients) == 3
        assert count_products(split.of_weights, weight, kept) == 2
    np.testing.assert_allclose(got, want[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dx, want[1], rtol=1e-5, atol=1e-6)
    # Inputs of both products and gradients of their outputs; of the inner ones, on each device.
    assert sorted(each.shape for each in kept) == [(2, 4, 8), (2, 4, 8), (8, 4), (8, 4)]


def grouped_products(fn, *args) -> collections.Counter[str]:
    """Returns the number of grouped matmuls, by kernel."""
    calls = [
        x.eqn for x in walk(jax.make_jaxpr(fn)(*args)) if x.eqn.primitive.name == "pallas_call"
    ]
    return collections.Counter(eqn.params["name"] for eqn in calls)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_experts", "axes", "repeated"),
    [
        (4, {"data": 4, "expert": 2}, 0),
        (16, {"expert": 8}, 2),  # A loop of further rounds, whose forward pass is repeated.
    ],
)
def test_weight_gradients_of_experts_on_other_devices_are_deferred(num_experts, axes, repeated):
    layer = model_config(stacked(transformer_layer(moe(num_experts=num_experts)), num_layers=2))
    model = layer.instantiate(parent=None)
    x, batch = jnp.ones((8, 8, 16)), packed_batch()  # All tokens go to the same experts.

    def layers(params, x):
        inputs = {"x": x, "positions": batch["positions"]}
        y, found = functional(model.decoder, None, params, inputs, is_training=True)
        return y, found.total_aux_loss()

    gradients = x, jnp.ones(())
    with jax.set_mesh(mesh(**axes)):
        params = initial(model)["decoder"]
        with use_backends({"gmm": "tpu"}):
            whole = lambda params, x: jax.vjp(layers, params, x)[1](gradients)
            split = split_backward(layers, params, x)
            of_input = grouped_products(split.of_input, params, x, (), gradients)
            of_weights = grouped_products(split.of_weights, params, split.kept)
            expected = grouped_products(whole, params, x)
        assert of_input["gmm"]
        assert of_input["gmm_weight_gradient"] == 0
        assert of_weights["gmm_weight_gradient"] == expected["gmm_weight_gradient"]
        assert of_weights["gmm"] == repeated
        if repeated:
            split = split_backward(layers, params, x)
            dx, kept = jax.jit(split.of_input)(params, x, (), gradients)
            got = jax.jit(split.of_weights)(params, kept), dx
            assert_trees_close(got, tuple(jax.jit(whole)(params, x)))
