import jax
import jax.numpy as jnp

from moelib.kernels.gmm import gmm


def test_ragged_dot_is_what_a_tpu_gets():
    operands = [jax.ShapeDtypeStruct(s, jnp.float32) for s in [(64, 8), (4, 8, 16)]]
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
    traced = jax.jit(gmm).trace(*operands, sizes)
    assert "ragged_dot" in traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "ragged_dot" not in traced.lower(lowering_platforms=("cpu",)).as_text()
