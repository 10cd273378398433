"""Dispatch in rounds: which rounds there are, what they hold, and that they change nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from moelib.layers.moe.dispatch import DenseDispatcher, Local, positions
from moelib.layers.moe.rounds import FURTHER_ROUNDS, rows_per_round, run_in_rounds
from tests.layers.calling import normal

T, K, D = 6, 2, 4
IDS = jnp.asarray([[0, 1], [0, 3], [1, 3], [3, 0], [2, 1], [3, 3]])  # 3 stands for no expert.
ROUNDS = jnp.asarray([[0, 0], [1, 9], [0, 9], [9, 2], [1, 2], [9, 9]])


@pytest.mark.parametrize(
    ("factor", "most", "expected"), [(None, 8, 8), (1.25, 2, 2), (1.25, 2.5, 1.25), (3, 2.5, 2.5)]
)
def test_a_round_holds_its_factor_where_the_worst_case_is_above_twice_the_balanced_load(
    factor, most, expected
):
    assert rows_per_round(factor, 100, 100 * most) == 100 * expected


def test_positions_count_the_earlier_members_of_a_group():
    position, sizes = positions(jnp.asarray([[2, 0, 2, 5, 2, 0], [1, 1, 0, 2, 2, 2]]), 3, ())
    np.testing.assert_array_equal(position, [[0, 0, 1, 0, 2, 1], [0, 1, 0, 0, 1, 2]])
    np.testing.assert_array_equal(sizes, [[2, 0, 3], [1, 2, 3]])


def total(seen, values, num_rounds):
    """Returns a sum over tokens and experts that is not linear in any of its arguments."""

    params, x, weights = values

    def run(local):
        jax.debug.callback(lambda ids: seen.append(np.asarray(ids)), local.ids)
        scale = jnp.pad(local.params, (0, 1))[local.ids] ** 2 * local.weights  # [T, K]
        return checkpoint_name(jnp.sin(local.x), "sine") * jnp.sum(scale, 1)[:, None]

    local = Local(DenseDispatcher, params, x, IDS, weights, 1)
    return run_in_rounds(run, local, ROUNDS, num_rounds, no_expert=3)


@pytest.mark.parametrize("num_rounds", [1, 2, 3])
def test_each_round_runs_once_forward_and_the_further_ones_again_backward(num_rounds):
    params, x = jnp.asarray(normal(3)), jnp.asarray(normal(T, D, seed=1))
    weights, grad = jnp.asarray(normal(T, K, seed=2)), jnp.asarray(normal(T, D, seed=3))
    kept = ROUNDS < num_rounds
    seen = []

    def direct(params, x, weights):
        scale = jnp.where(kept, jnp.pad(params, (0, 1))[IDS] ** 2 * weights, 0)
        return jnp.sin(x) * jnp.sum(scale, 1)[:, None]

    @jax.jit
    def pulled(number, *values):
        y, pull = jax.vjp(lambda *values: total(seen, values, number), *values)
        return y, pull(grad)

    got = pulled(jnp.int32(num_rounds), params, x, weights)
    want, pull = jax.vjp(direct, params, x, weights)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, (want, pull(grad))
    )
    jax.effects_barrier()
    forward_and_backward = [*range(num_rounds), *range(1, num_rounds)]
    assert len(seen) == len(forward_and_backward)
    for i in range(num_rounds):
        expected = np.where(ROUNDS == i, IDS, 3)
        found = sum(np.array_equal(ids, expected) for ids in seen)
        assert found == forward_and_backward.count(i)


def test_remat_saves_the_names_of_the_first_round_only():
    values = normal(3), normal(T, D), normal(T, K)

    def sines(*names):
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        number = lambda v: v[0].astype(int)[0] * 0 + 2
        loss = jax.checkpoint(lambda *v: jnp.sum(total([], v, number(v))), policy=policy)
        return str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*values)).count(" sin ")

    # Forward the first and the further rounds, recomputed the first, backward the further ones.
    assert sines() == 4
    assert sines("sine") == 3


def test_the_loop_has_its_name_in_the_compiled_program():
    values = normal(3), normal(T, D), normal(T, K)
    grads = jax.grad(lambda *v: jnp.sum(total([], v, IDS[0, 1] + 1) ** 2), (0, 1, 2))
    lowered = jax.jit(grads).lower(*values).compile().as_text()
    loops = [line for line in lowered.splitlines() if " while(" in line]
    assert (
        len(loops) == 4
    )  # In each pass, one over the rounds, inside one of one iteration or none.
    assert all(FURTHER_ROUNDS in line for line in loops)


def test_many_rounds_of_small_results_and_gradients_do_not_vanish():
    num_rounds = 17
    rounds = jnp.arange(num_rounds)[None]
    # Each further round adds half of the last place of the first one's result.
    weights = jnp.asarray([[1.0] + [2.0**-9] * (num_rounds - 1)], jnp.bfloat16)
    ids, x = jnp.zeros_like(rounds), jnp.ones((1, 1), jnp.bfloat16)

    def run(local):
        weight = jnp.where(local.ids == 0, local.weights, 0).sum(1, keepdims=True)
        return local.x * weight

    @jax.jit
    def pulled(x, number):
        local = lambda x: Local(DenseDispatcher, (), x, ids, weights, 1)
        y, pull = jax.vjp(lambda x: run_in_rounds(run, local(x), rounds, number, no_expert=1), x)
        return y, pull(jnp.ones_like(y))[0]

    for found in pulled(x, jnp.int32(num_rounds)):
        assert found.dtype == jnp.bfloat16
        assert float(found[0, 0]) == 1 + (num_rounds - 1) * 2.0**-9
