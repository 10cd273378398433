import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from moelib.kernels.varying import align, zeros_like_varying


def _mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def test_nothing_changes_outside_of_shard_map():
    x, y = jnp.ones(2), jnp.ones(3)
    assert align(x, y)[0] is x
    assert zeros_like_varying((2, 3), jnp.bfloat16, x).dtype == jnp.bfloat16


def test_the_arrays_of_trees_vary_alike_and_what_is_none_stays_none():
    spec = PartitionSpec("a")

    def local(x: jax.Array, w: jax.Array) -> jax.Array:
        (also_x, nothing), pair = align((x, None), {"w": w})
        assert nothing is None
        assert jax.typeof(pair["w"]) == jax.typeof(also_x) == jax.typeof(x)
        return also_x + pair["w"]

    specs = (spec, PartitionSpec())
    run = jax.shard_map(local, mesh=_mesh(), in_specs=specs, out_specs=spec)
    np.testing.assert_array_equal(run(jnp.ones(2), jnp.ones(1)), [2, 2])


def test_the_gradient_of_a_replicated_array_is_summed_over_the_axes_it_is_aligned_to():
    spec = PartitionSpec("a", "b")

    def local(x: jax.Array, w: jax.Array) -> jax.Array:
        x, w = align(x, w)
        total, _ = jax.lax.scan(
            lambda carry, row: (carry + row * w, None), zeros_like_varying((1,), x.dtype, x), x
        )
        return jax.lax.psum(total.sum(), ("a", "b"))

    x = jnp.arange(24, dtype=jnp.float32).reshape(6, 4)
    run = jax.shard_map(
        local, mesh=_mesh(), in_specs=(spec, PartitionSpec()), out_specs=PartitionSpec()
    )
    grad = jax.jit(jax.grad(run, argnums=1))(x, jnp.ones(1))
    np.testing.assert_allclose(grad, [x.sum()])
