import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from moelib.parallel.collectives import vary, varying_axes
from moelib.parallel.mesh import create_device_mesh, mesh_shape_from_axes

MESH = create_device_mesh(mesh_shape_from_axes(data=4, model=2))
SPLIT, WHOLE = PartitionSpec("data"), PartitionSpec()


def test_varying_axes_are_those_that_an_array_is_split_over():
    seen = []

    def local(x, w):
        seen.append((varying_axes(x), varying_axes(w), varying_axes(vary(w, ("data", "model")))))
        return x

    with jax.set_mesh(MESH):
        jax.shard_map(local, in_specs=(SPLIT, WHOLE), out_specs=SPLIT)(jnp.ones(4), jnp.ones(4))
    assert seen[0] == ({"data"}, set(), {"data", "model"})


def test_outside_of_a_shard_map_nothing_varies():
    x = jnp.ones(4)
    assert varying_axes(x) == frozenset()
    assert vary(x, ()) is x


def test_gradients_of_what_varies_are_summed_once():
    x, w = jnp.arange(8.0).reshape(4, 2), jnp.asarray([2.0, 3.0])

    def local(w, x):
        w, x = vary((w, x), ("data",))
        return jax.lax.psum(jnp.sum(x @ w), "data")

    def loss(w, x):
        return jax.shard_map(local, in_specs=(WHOLE, SPLIT), out_specs=WHOLE)(w, x)

    with jax.set_mesh(MESH):
        value, grad = jax.jit(jax.value_and_grad(loss))(w, x)
    np.testing.assert_allclose(value, jnp.sum(x @ w), rtol=1e-6)
    np.testing.assert_allclose(grad, jnp.sum(x, 0), rtol=1e-6)


def test_what_varies_already_is_left_alone():
    def local(x):
        assert vary(x, ("data",)) is x
        return x

    with jax.set_mesh(MESH):
        jax.shard_map(local, in_specs=SPLIT, out_specs=SPLIT)(jnp.ones(4))
