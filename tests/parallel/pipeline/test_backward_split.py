"""Both parts of a backward pass compute what `jax.vjp` does, and no product twice."""

import jax
import jax.numpy as jnp
import numpy as np

from moelib.core.jaxpr import walk
from moelib.parallel.pipeline.backward_split import split_backward


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
