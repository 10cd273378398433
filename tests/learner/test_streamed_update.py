"""Streamed updates of a state in host memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moelib.core.jaxpr import walk
from moelib.learner import offload
from moelib.learner.streamed_update import _groups, streamed_update
from moelib.planning.compiled.compile_step import no_compilation_cache
from moelib.planning.hardware.topologies import topology


def test_streamed_update_equals_the_update():
    """Scalars shared by all parameters, scans, unused results, a moment without dimensions."""

    def update(params, gradients, state):
        total, doubled = jax.lax.scan(lambda c, x: (c + x, 2 * x), 0.0, jnp.arange(3.0))
        jnp.sum(gradients["a"]) * 3.0
        rate = doubled[1] / jnp.sum(jnp.square(gradients["b"]))
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], gradients)
        params = jax.tree.map(lambda p, m: p - rate * m, params, moments)
        return params, {"m": moments, "count": state["count"] + 1}, {"rate": rate + total}

    params = {"a": jnp.arange(4.0), "b": jnp.ones((2, 3)), "scalar": jnp.ones(())}
    state = {"m": jax.tree.map(jnp.ones_like, params), "count": jnp.zeros((), jnp.int32)}
    run = lambda p, s: streamed_update(update, p, p, offload.to_host(s))
    eqns = [site.eqn for site in walk(jax.make_jaxpr(run)(params, state))]
    assert 3 in [eqn.params["length"] for eqn in eqns if eqn.primitive.name == "scan"]
    turned = jax.jit(run)(params, state)
    want = jax.jit(update)(params, params, state)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), turned, want)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(turned[1]["m"]) if x.ndim}
    assert kinds == {"pinned_host"}


def test_results_that_share_required_arrays_are_one_group():
    required = [frozenset(arrays) for arrays in ("a", "b", "", "ab", "c", "c")]
    assert _groups(required) == [(frozenset("ab"), [0, 1, 3]), (frozenset("c"), [4, 5])]


@pytest.mark.parametrize("wrapped", [False, True])
def test_parameters_that_are_updated_together_are_counted(wrapped, caplog):
    optimizer = optax.adam(0.1)
    if wrapped:  # One condition, on all gradients, around all updates.
        optimizer = optax.apply_if_finite(optimizer, 3)
    params = {"a": jnp.ones(3), "b": jnp.ones(2)}

    def update(params, gradients, state):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, {}

    run = lambda p, s: streamed_update(update, p, p, offload.to_host(s))
    jax.eval_shape(run, params, optimizer.init(params))
    assert ("update of each of 2 parameters" in caplog.text) == wrapped


def test_a_metric_computed_from_moments_is_refused():
    params, state = {"w": jnp.ones(3)}, {"m": jnp.ones(3)}

    def update(params, gradients, state):
        return params, state, {"mean": state["m"].mean()}

    with pytest.raises(ValueError, match="offload_state is True"):
        jax.jit(lambda *args: streamed_update(update, *args))(
            params, params, offload.to_host(state)
        )


@pytest.mark.slow
def test_on_a_tpu_moments_are_copied_one_parameter_at_a_time():
    pytest.importorskip("libtpu")
    device = NamedSharding(Mesh(topology("v6e:2x2x1").devices[:1], "x"), PartitionSpec())
    host = device.with_memory_kind("pinned_host")
    num, shape = 6, (2048, 2048)
    struct = lambda where: {
        f"w{i}": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where) for i in range(num)
    }

    adam = optax.scale_by_adam()  # Corrects the bias of all moments in one jitted function.

    def update(params, gradients, moments):
        count = jnp.zeros((), jnp.int32)
        state = optax.ScaleByAdamState(count, *moments)
        updates, state = adam.update(gradients, state, params)
        return optax.apply_updates(params, updates), (state.mu, state.nu), {}

    def at_once(params, gradients, moments):
        params, moments, rest = update(params, gradients, offload.to_device(moments))
        return params, offload.to_host(moments), rest

    def temporaries(run):
        step = jax.jit(run, donate_argnums=(0, 2), out_shardings=(device, host, device))
        with no_compilation_cache():
            moments = struct(host), struct(host)
            compiled = step.lower(struct(device), struct(device), moments).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    one = 4 * shape[0] * shape[1]
    assert temporaries(at_once) > 2 * num * one
    assert temporaries(lambda *args: streamed_update(update, *args)) < 4.1 * one  # There and back.
