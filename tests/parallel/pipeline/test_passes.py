"""The passes of a function compute what `jax.vjp` does, and no product twice."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core.errors import UserError
from moelib.core.jaxpr import num_consts_and_carries, walk
from moelib.core.module import functional
from moelib.kernels.backend import kernel_backends
from moelib.parallel.pipeline.buffers import Entry
from moelib.parallel.pipeline.passes import split_passes
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


def places(values, before=0):
    """Returns an entry of a larger buffer for each array, to which it is added if it is not 0."""
    new = lambda a: np.full((2, 3, *a.shape), before, a.dtype)
    return jax.tree.map(lambda a: Entry(new(a), (0, 1), adds=before != 0), values)


def written(buffers, before=0):
    """Returns what was written to `places`, and asserts that nothing else was."""
    buffers = jax.tree.map(np.array, buffers)
    parts = jax.tree.map(lambda a: a[0, 1] - before, buffers)
    for buffer in jax.tree.leaves(buffers):
        buffer[0, 1] = before
        np.testing.assert_array_equal(buffer, before)
    return parts


def check(fn, params, x, same, products, saved, deferred) -> None:
    """Compares the passes of a function with `jax.vjp`.

    Args:
        fn: Function of (params, x, nothing, same).
        params: Its parameters.
        x: Its input.
        same: Its other argument.
        products: Numbers of products of the forward pass and both parts of the backward pass.
        saved: Sizes of the values kept for the backward pass.
        deferred: Sizes of those kept for the gradients of the weights.
    """
    passes = split_passes(fn, params, x, (), same)
    run = lambda params, x: fn(params, x, (), same)

    @jax.jit
    def whole(params, x):
        results, vjp, auxiliary = jax.vjp(run, params, x, has_aux=True)
        gradients = jax.tree.map(jnp.cos, results)
        return (results, auxiliary), gradients, vjp(gradients)

    want, gradients, (of_params, of_x) = whole(params, x)
    inside = jax.tree.map(lambda a: Entry(np.stack([a * 0, a]), (1,)), params)
    to_saved, to_deferred = places(passes.saved), places(passes.deferred)
    sums = places(params, before=1)
    compiled = lambda fn, *args: jax.jit(lambda: fn(*args))()  # An entry's index is no array.
    got, kept = compiled(passes.forward, inside, x, (), same, to_saved)
    assert_trees_close(got, want)
    kept = written(kept)
    dx, total = compiled(passes.backward, inside, same, kept, gradients, sums)
    assert_trees_close((dx, written(total, before=1)), (of_x, of_params))
    dx, rest = compiled(passes.of_input, inside, same, kept, gradients, to_deferred)
    assert_trees_close(dx, of_x)
    rest = written(rest)
    _, total = compiled(passes.of_weights, inside, same, rest, sums)
    assert_trees_close(written(total, before=1), of_params)
    for values, structs, sizes in ((kept, passes.saved, saved), (rest, passes.deferred, deferred)):
        assert [(a.shape, a.dtype) for a in values] == [(s.shape, s.dtype) for s in structs]
        assert sorted(each.size for each in structs) == sizes
    assert [
        count_products(passes.forward, params, x, (), same, to_saved),
        count_products(passes.of_input, params, same, kept, gradients, to_deferred),
        count_products(passes.of_weights, params, same, rest, sums),
    ] == products
    assert count_products(passes.backward, params, same, kept, gradients, sums) == sum(products[1:])


def test_passes_of_a_layer():
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"up": jax.random.normal(keys[0], (4, 8)), "down": jax.random.normal(keys[1], (8, 4))}
    x = jax.random.normal(keys[2], (3, 4))
    fn = lambda params, x, _, scale: (layer(params, x, scale), jnp.sum(x))
    # Forward: up, down; recomputed: up; gradients of the inputs and of the weights of both. Saved
    # are inputs of both products and the output; deferred, the inputs and the outputs' gradients.
    check(fn, params, x, 0.5, [2, 3, 2], [12, 12, 24], [12, 12, 24, 24])


def test_parameters_without_a_gradient_have_zeros():
    params = {"used": jnp.ones((2, 2)), "unused": jnp.ones(3)}
    fn = lambda params, x, *_: (x @ params["used"], ())
    passes, x = split_passes(fn, params, jnp.ones((2, 2)), (), ()), jnp.ones((2, 2))
    _, kept = passes.forward(params, x, (), (), places(passes.saved))
    _, sums = passes.backward(params, (), written(kept), x, places(params, before=1))
    np.testing.assert_array_equal(written(sums, before=1)["unused"], np.zeros(3))


def layers(params, x, _, scale):
    def body(carry, own):
        x, total = carry
        y, loss = layer(own, x * own["scale"][None] * params["all"][None], scale)
        return (y, total + loss), None

    own = {name: params[name] for name in ("up", "down", "scale")}
    return jax.lax.scan(body, (x, 0.0), own)[0], ()


def parameters_of_layers(num=3):
    keys = jax.random.split(jax.random.key(0), 6)
    params = {
        "scale": jax.random.normal(keys[5], (num, 4)),
        "up": jax.random.normal(keys[0], (num, 4, 8)),
        "down": jax.random.normal(keys[1], (num, 8, 4)),
        "all": jax.random.normal(keys[4], (4,)),
    }
    return params, jax.random.normal(keys[2], (3, 4))


def test_a_loop_over_layers_is_split():
    # Of each layer: saved are its input, also scaled by each vector, its output, and the input of
    # the second product; deferred, inputs of both products and gradients of their outputs, and
    # gradients of vectors.
    saved, deferred = [36, 36, 36, 36, 72], [4, 12, 36, 36, 72, 72]
    check(layers, *parameters_of_layers(), 0.1, [2, 3, 2], saved, deferred)


def test_a_stage_of_no_layers():
    check(layers, *parameters_of_layers(0), 0.1, [2, 3, 2], [0] * 5, [0, 0, 0, 0, 0, 4])


def test_each_pass_is_one_loop_that_reads_and_writes_entries():
    params, x = parameters_of_layers()
    passes, inside = split_passes(layers, params, x, (), 0.1), places(params)
    sums, gradients = places(params, before=1), (x, jnp.ones(()))
    before = inside, 0.1, passes.saved, gradients
    for run, *args, into in (
        (passes.forward, inside, x, (), 0.1, places(passes.saved)),
        (passes.backward, *before, sums),
        (passes.of_input, *before, places(passes.deferred)),
        (passes.of_weights, inside, 0.1, passes.deferred, sums),
    ):
        sites = walk(jax.make_jaxpr(run)(*args, into))
        (loop,) = (site.eqn for site in sites if site.eqn.primitive.name == "scan")
        num_consts, num_carry = num_consts_and_carries(loop)
        assert len(loop.outvars) == num_carry  # Nothing is stacked.
        each = {v.aval.shape for v in loop.invars[num_consts + num_carry :]}
        assert not each & {a.shape for a in params.values()}


def test_a_shard_map_is_split():
    def mapped(params, x, *_):
        def local(weight, x):
            weight = jax.lax.all_gather(weight, "data", tiled=True)  # Repeated instead of kept.
            hidden = jnp.tanh(x @ weight.T)
            own = jnp.mean(hidden)  # A scalar, different on each device.
            return jnp.sin(own * hidden) @ weight, jax.lax.pmean(own, "data")

        split = jax.P("data")
        mapped = jax.shard_map(local, in_specs=(split, split), out_specs=(split, jax.P()))
        return mapped(params, x), ()

    weight, x = jax.random.normal(jax.random.key(0), (2, 8, 4))
    with jax.set_mesh(mesh(data=2)):
        # Saved are the input, scalars, and three arrays of the hidden size on each device;
        # deferred, inputs of both products and gradients of their outputs.
        check(mapped, weight, x, (), [2, 2, 2], [1, 2, 2, 32, 64, 64, 64], [32, 32, 64, 64])


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

    def layers(params, x, _, positions):
        inputs = {"x": x, "positions": positions}
        y, found = functional(model.decoder, None, params, inputs, is_training=True)
        return (y, found.total_aux_loss()), ()

    same, gradients = batch["positions"], (x, jnp.ones(()))
    with jax.set_mesh(mesh(**axes)):
        params = initial(model)["decoder"]
        run = lambda params, x: layers(params, x, (), same)[0]
        whole = lambda params, x: jax.vjp(run, params, x)[1](gradients)
        with kernel_backends({"gmm": "tpu"}):
            passes = split_passes(layers, params, x, (), same)
            saved, deferred, sums = map(places, (passes.saved, passes.deferred, params))
            given = params, same, passes.saved, gradients
            forward = grouped_products(passes.forward, params, x, (), same, saved)
            of_input = grouped_products(passes.of_input, *given, deferred)
            of_weights = grouped_products(passes.of_weights, params, same, passes.deferred, sums)
            expected = grouped_products(whole, params, x)
        assert forward["gmm"]
        assert of_input["gmm"]
        assert forward["gmm_weight_gradient"] == of_input["gmm_weight_gradient"] == 0
        assert of_weights["gmm_weight_gradient"] == expected["gmm_weight_gradient"]
        assert of_weights["gmm"] == repeated
        if repeated:
            passes = split_passes(layers, params, x, (), same)
            _, saved = passes.forward(params, x, (), same, saved)
            dx, deferred = passes.of_input(params, same, written(saved), gradients, deferred)
            _, sums = passes.of_weights(params, same, written(deferred), sums)
            got = written(sums), dx
            assert_trees_close(got, tuple(jax.jit(whole)(params, x)))


def test_a_scan_in_a_shard_map_that_checks_axes_is_split():
    def mapped(params, x, *_):
        def local(weights, x):
            def layer(x, weight):
                weight = jax.lax.all_gather(weight, "data", tiled=True)
                return jnp.tanh(x @ weight), jnp.mean(x)[None]

            return jax.lax.scan(layer, x, weights)

        split = jax.P(None, "data")
        specs = {"in_specs": (split, jax.P("data")), "out_specs": (jax.P("data"), split)}
        return jax.shard_map(local, **specs)(params, x), ()

    keys = jax.random.split(jax.random.key(0))
    weights, x = jax.random.normal(keys[0], (3, 4, 4)), jax.random.normal(keys[1], (4, 4))
    with jax.set_mesh(mesh(data=2)):
        (y, means), vjp = jax.vjp(lambda *args: mapped(*args)[0], weights, x)
        gradients = jnp.ones_like(y), jnp.ones_like(means)
        passes = split_passes(mapped, weights, x, (), ())
        assert passes.saved
        assert passes.deferred
        assert vjp(gradients)[0].shape == weights.shape


def test_a_side_effect_in_a_loop_over_layers_is_refused():
    def step(x, weight):
        jax.debug.print("{}", x[0])
        return x * weight, None

    fn = lambda params, x, others, same: (jax.lax.scan(step, x, params)[0], ())
    with pytest.raises(UserError, match=r"mesh axis pipeline: .* debug_"):
        split_passes(fn, jnp.ones((2, 3)), jnp.ones(3), (), ())
