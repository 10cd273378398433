"""The ragged all-to-all between eight devices: against a loop over pairs of devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core.varying import vary
from moelib.parallel.exchange import exchange, gather_sizes
from moelib.parallel.mesh import create_device_mesh, mesh_shape_from_axes

D, SENT, RECEIVED, PAIR = 3, 12, 40, 5
SPLIT = jax.P(("data", "expert"))


def sizes_of(n, seed):
    """Returns how many rows [groups, sender, receiver] travel, some of them none."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, PAIR + 1, (8 // n, n, n)).astype(np.int32)
    while (over := sizes.sum(-1) > SENT).any():
        sizes[over] = sizes[over] // 2
    return sizes


def moved(rows, sizes):
    """Each group of devices by itself: rows [8, SENT, D] -> what each device got."""
    groups, n, _ = sizes.shape
    rows = np.asarray(rows).reshape(groups, n, SENT, D)
    starts = np.cumsum(sizes, -1) - sizes
    return [
        np.concatenate([rows[g, s, starts[g, s, r] :][: sizes[g, s, r]] for s in range(n)])
        for g in range(groups)
        for r in range(n)
    ]


def run(fn, n, *inputs):
    mesh = create_device_mesh(mesh_shape_from_axes(expert=n, data=8 // n))
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(fn, in_specs=SPLIT, out_specs=SPLIT)
        return jax.device_get(jax.jit(mapped)(*inputs))


def there(rows, own_sizes):
    sizes = gather_sizes(own_sizes[0], ("expert",))
    return exchange(rows, sizes, axes=("expert",), num_received=RECEIVED, max_pair=PAIR)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_rows_arrive_sorted_by_sender(n):
    sizes = sizes_of(n, seed=n)
    rows = np.random.default_rng(0).normal(size=(8 * SENT, D)).astype(np.float32)
    got = run(there, n, rows, sizes.reshape(8, n)).reshape(8, RECEIVED, D)
    for mine, want in zip(got, moved(rows, sizes), strict=True):
        np.testing.assert_array_equal(mine[: len(want)], want)


@pytest.mark.parametrize("n", [2, 8])
def test_the_transposed_sizes_send_rows_back_and_are_the_derivative(n):
    sizes = sizes_of(n, seed=n + 1)
    sent = sizes.sum(-1).reshape(8)
    valid = (np.arange(SENT) < sent[:, None])[..., None]
    rows = np.random.default_rng(1).normal(size=(8 * SENT, D)).astype(np.float32)

    def back(rows, own_sizes):
        sizes = gather_sizes(own_sizes[0], ("expert",)).T
        send = functools.partial(exchange, axes=("expert",), num_received=SENT, max_pair=PAIR)
        return send(there(rows, own_sizes), sizes)

    got = run(back, n, rows, sizes.reshape(8, n)).reshape(8, SENT, D)
    np.testing.assert_array_equal(
        np.where(valid, got, 0), np.where(valid, rows.reshape(8, SENT, D), 0)
    )

    def gradient(rows, own_sizes):
        received = jnp.sum(gather_sizes(own_sizes[0], ("expert",))[:, jax.lax.axis_index("expert")])
        came = (jnp.arange(RECEIVED) < received)[:, None]
        grad = vary(jnp.ones((RECEIVED, D)), ("data", "expert"))
        out, pull = jax.vjp(lambda rows: there(rows, own_sizes), rows)
        return pull(jnp.where(came, 3.0 * out + grad, jnp.nan))[0]

    got = run(gradient, n, rows, sizes.reshape(8, n)).reshape(8, SENT, D)
    want = 3.0 * rows.reshape(8, SENT, D) + 1.0
    np.testing.assert_allclose(np.where(valid, got, 0), np.where(valid, want, 0), atol=1e-6)


def test_a_program_for_the_devices_of_a_mesh_has_no_conditional():
    with jax.set_mesh(create_device_mesh(mesh_shape_from_axes(expert=8))):
        mapped = jax.shard_map(there, in_specs=SPLIT, out_specs=SPLIT)
        jaxpr = jax.make_jaxpr(mapped)(jnp.ones((8 * SENT, D)), jnp.ones((8, 8), jnp.int32))
    assert "all_to_all" in str(jaxpr)
    assert "cond[" not in str(jaxpr)
