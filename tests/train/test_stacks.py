import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core.jaxpr import walk
from moelib.kernels.backend import Device
from moelib.train import stacks
from moelib.train.stacks import with_empty_stacks


def _step(params, x):
    """Returns the loss and gradients of a stack of layers, of two micro-batches in a scan."""

    def loss(params, x):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), jnp.sum(w)))
        x, sums = jax.lax.scan(layer, x, params["layers"])
        return jnp.sum(x @ params["head"]) + jnp.sum(sums**2)

    def add(total, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(jnp.add, total, grads), value

    return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), x)


def _arguments():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"layers": (5, 8, 8), "head": (8, 4)}
    params = {k: jax.random.normal(key, shapes[k]) for k, key in zip(shapes, keys, strict=False)}
    return params, jax.random.normal(keys[2], (2, 3, 8))


def test_the_results_are_those_of_the_function():
    arguments = _arguments()
    want, got = jax.jit(_step)(*arguments), jax.jit(with_empty_stacks(_step))(*arguments)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_backward_scans_write_into_empty_stacks():
    found = jax.make_jaxpr(with_empty_stacks(_step))(*_arguments())
    empty = [
        site.eqn.outvars[0].aval.shape for site in walk(found) if "empty" in str(site.eqn.primitive)
    ]
    assert empty == [(5, 8, 8)]
    backward = [site.eqn for site in walk(found) if site.eqn.params.get("reverse")]
    assert [eqn.params["jaxpr"].out_avals[-1].shape for eqn in backward] == [(5, 8, 8)]


def test_stacks_of_gpus_are_zeros_which_xla_partitions(monkeypatch):
    monkeypatch.setattr(stacks, "current_device", lambda: Device("gpu", "NVIDIA H100", None))
    found = jax.make_jaxpr(stacks.with_empty_stacks(_step))(*_arguments())
    assert not [site for site in walk(found) if "empty" in str(site.eqn.primitive)]


def test_a_scan_over_references_keeps_its_order_of_writes():
    def fill(x):
        ref = jax.new_ref(jnp.zeros(()))

        def step(carry, x):
            ref[...] = 2 * ref[...] + x
            return carry, ref[...]

        _, seen = jax.lax.scan(step, None, x, reverse=True)
        return seen, ref[...]

    seen, last = jax.jit(with_empty_stacks(fill))(jnp.arange(4.0))
    np.testing.assert_array_equal(seen, [34, 17, 8, 3])
    assert last == 34


@pytest.mark.parametrize("length", [0, 3])
def test_scans_of_random_keys_or_of_no_turns_stay(length):
    def keys(x):
        step = lambda key, x: (jax.random.fold_in(key, x), jax.random.split(key)[0])
        return jax.lax.scan(step, jax.random.key(0), x, reverse=True)

    x = jnp.arange(length)
    want, got = keys(x), jax.jit(with_empty_stacks(keys))(x)
    data = lambda found: [np.asarray(jax.random.key_data(each)) for each in found]
    jax.tree.map(np.testing.assert_array_equal, data(got), data(want))
    empty = lambda x: jax.lax.scan(lambda c, x: (c + x, c), 0.0, x, reverse=True)
    jax.tree.map(np.testing.assert_array_equal, with_empty_stacks(empty)(1.0 * x), empty(1.0 * x))
