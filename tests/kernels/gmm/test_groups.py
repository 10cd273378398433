import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.kernels.gmm.groups import activated, output_visits, row_ranges, weight_visits

ranges_of = jax.jit(row_ranges, static_argnums=1)
of_output, of_weights = (
    jax.jit(visits, static_argnums=(2, 3)) for visits in (output_visits, weight_visits)
)


def _columns(visits, count):
    return {name: np.asarray(x)[: int(count)] for name, x in visits._asdict().items()}


def _groups(seed, num_rows):
    rng = np.random.default_rng(seed)
    total = [0, num_rows // 2, num_rows, 2 * num_rows][seed % 4]
    sizes = rng.multinomial(total, rng.dirichlet(np.full(6, 0.3)))
    return sizes, ranges_of(sizes.astype(np.int32), num_rows)


def test_ranges_end_with_the_rows():
    starts, ends = ranges_of(np.asarray([3, 0, 4, 9], np.int32), 10)
    assert (starts.tolist(), ends.tolist()) == ([0, 3, 3, 7], [3, 3, 7, 10])


@pytest.mark.parametrize("seed", range(4))
def test_every_row_is_written_by_its_group_and_every_tile_in_one_run(seed):
    num_rows, tile = 100, 16
    sizes, (starts, ends) = _groups(seed, num_rows)
    found = _columns(*of_output(starts, ends, num_rows, tile))
    owner = np.full(112, -1)
    for group, out_tile, start, end in zip(
        found["group"], found["out_tile"], found["start"], found["end"], strict=True
    ):
        assert (owner[16 * out_tile + start : 16 * out_tile + end] == -1).all()
        owner[16 * out_tile + start : 16 * out_tile + end] = group
    want = np.repeat(np.arange(6), sizes)[:num_rows]
    np.testing.assert_array_equal(owner, np.append(want, [-1] * (112 - len(want))))
    runs = found["out_tile"][found["first"] == 1]
    assert sorted(runs) == list(range(7))
    # A visit without rows reads nothing that was not read before.
    empty = found["start"] == found["end"]
    assert not empty[: (~empty).sum()].any()
    for name in ("group", "tile"):
        assert len(set(found[name][max((~empty).sum() - 1, 0) :])) <= 1


@pytest.mark.parametrize("seed", range(4))
def test_every_group_is_written_once_and_sums_its_rows(seed):
    num_rows, tile = 100, 16
    sizes, (starts, ends) = _groups(seed, num_rows)
    found = _columns(*of_weights(starts, ends, num_rows, tile))
    assert found["group"][found["first"] == 1].tolist() == list(range(6))
    assert found["group"][found["last"] == 1].tolist() == list(range(6))
    assert (found["tile"] < 7).all()
    rows = np.zeros(6, int)
    np.add.at(rows, found["group"], found["end"] - found["start"])
    np.testing.assert_array_equal(rows, np.asarray(ends - starts))
    assert len(found["group"]) <= 7 + 6 + (sizes == 0).sum()


def test_an_empty_group_costs_no_visit_of_the_product():
    for sizes in ([64, 64], [64, 0, 0, 0, 64]):
        starts, ends = ranges_of(np.asarray(sizes, np.int32), 128)
        assert of_output(starts, ends, 128, 32)[1] == 4


def test_an_activation_is_zero_past_the_groups_and_scanned_layers_hold_no_zeros_for_it():
    rows, sizes = jnp.arange(10.0).reshape(5, 2).at[4].set(jnp.nan), jnp.asarray([1, 2])
    twice = lambda x: activated([x], lambda part: 2 * part, sizes)
    np.testing.assert_array_equal(twice(rows), [[0, 2], [4, 6], [8, 10], [0, 0], [0, 0]])
    twice = jax.custom_vjp(twice)
    twice.defvjp(lambda x: (twice(x), None), lambda _, grad: (grad,))
    layer = lambda x, _: (jnp.sin(jnp.sum(twice(rows[:, :1] * x[None]), 0)), None)
    run = lambda x: jnp.sum(jax.lax.scan(layer, x, length=2)[0])
    eqns = jax.make_jaxpr(jax.grad(run))(rows[0]).eqns
    shapes = [[x.aval.shape for x in eqn.invars] for eqn in eqns if eqn.primitive.name == "scan"]
    assert len(shapes) == 2
    for operands in shapes:
        assert (5, 2) not in operands
