"""Two loops over layers are one loop with the same results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core.jaxpr import walk
from moelib.parallel.pipeline.pair import in_one_loop

WEIGHTS = 0.4 * jax.random.normal(jax.random.key(0), (3, 4, 4))
X, Y = jax.random.normal(jax.random.key(1), (2, 5, 4))


def model(weights, x):
    def layer(x, weight):
        y = jnp.tanh(x @ weight)
        return x + y, jnp.mean(y)

    x, means = jax.lax.scan(jax.checkpoint(layer), 2 * x, weights)
    return jnp.sin(x), means


def forward():
    return jax.jit(model)(WEIGHTS, X)


def backward():
    losses = lambda weights: jnp.sum(model(weights, Y)[0] ** 2)
    return jax.vjp(losses, WEIGHTS)[1](jnp.float32(3.0))


def test_two_loops_are_one_with_the_same_results():
    for got, want in zip(
        jax.tree.leaves(in_one_loop(forward, backward)),
        jax.tree.leaves((forward(), backward())),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def products(jaxpr) -> list[int]:
    """Returns the number of matrix products in the body of each scan."""
    scans = [site.eqn for site in walk(jaxpr) if site.eqn.primitive.name == "scan"]
    inside = lambda eqn: [x.eqn.primitive.name for x in walk(eqn.params["jaxpr"])]
    return sorted(inside(eqn).count("dot_general") for eqn in scans)


def test_the_loop_has_the_products_of_both():
    apart = jax.make_jaxpr(lambda: (forward(), backward()))()
    assert products(apart) == [1, 1, 3]  # Forward; forward again, backward with a recomputation.
    assert products(jax.make_jaxpr(lambda: in_one_loop(forward, backward))()) == [1, 4]


def loop(num_layers):
    return lambda: jax.lax.scan(lambda x, w: (x @ w, None), X, WEIGHTS[:num_layers])


@pytest.mark.parametrize(
    ("one", "other"),
    [(forward, lambda: jnp.cos(X)), (forward, loop(2)), (loop(0), loop(0))],  # Stage of no layer.
)
def test_other_loops_stay_apart(one, other):
    found, want = in_one_loop(one, other), (one(), other())
    jax.tree.map(np.testing.assert_array_equal, found, want)
