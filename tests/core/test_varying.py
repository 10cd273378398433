import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from moelib.core.varying import align, struct_like_varying, vary, varying_axes, zeros_like_varying

SPLIT, WHOLE = PartitionSpec("a"), PartitionSpec()


def _mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def test_nothing_varies_outside_of_shard_map():
    x, y = jnp.ones(2), jnp.ones(3)
    assert varying_axes(x) == frozenset()
    assert vary(x, ()) is x
    assert align(x, y)[0] is x
    assert zeros_like_varying((2, 3), jnp.bfloat16, x).dtype == jnp.bfloat16


def test_arrays_vary_over_the_axes_that_split_them_and_over_those_asked_for():
    def local(x: jax.Array, w: jax.Array) -> jax.Array:
        assert (varying_axes(x), varying_axes(w)) == ({"a"}, set())
        assert varying_axes(vary(w, ("a", "b"))) == {"a", "b"}
        assert vary(x, ("a",)) is x
        (also_x, nothing), pair = align((x, None), {"w": w})
        assert nothing is None
        assert jax.typeof(pair["w"]) == jax.typeof(also_x) == jax.typeof(x)
        zeros = zeros_like_varying(x.shape, x.dtype, x)
        assert jax.typeof(zeros) == jax.typeof(x)
        assert struct_like_varying((3,), x.dtype, x).manual_axis_type.varying == {"a"}
        return also_x + pair["w"] + zeros

    run = jax.shard_map(local, mesh=_mesh(), in_specs=(SPLIT, WHOLE), out_specs=SPLIT)
    np.testing.assert_array_equal(run(jnp.ones(2), jnp.ones(1)), [2, 2])


def test_the_gradient_of_a_replicated_array_is_summed_once_over_the_axes_it_is_aligned_to():
    def local(x: jax.Array, w: jax.Array) -> jax.Array:
        x, w = align(x, w)
        total, _ = jax.lax.scan(
            lambda carry, row: (carry + row * w, None), zeros_like_varying((1,), x.dtype, x), x
        )
        return jax.lax.psum(total.sum(), ("a", "b"))

    x = jnp.arange(24, dtype=jnp.float32).reshape(6, 4)
    specs = (PartitionSpec("a", "b"), WHOLE)
    run = jax.shard_map(local, mesh=_mesh(), in_specs=specs, out_specs=WHOLE)
    grad = jax.jit(jax.grad(run, argnums=1))(x, jnp.ones(1))
    np.testing.assert_allclose(grad, [x.sum()])
