import jax
import jax.numpy as jnp
import pytest

from moelib.kernels.gmm import gmm


@pytest.mark.parametrize(("dtype", "is_ragged_dot"), [(jnp.float32, False), (jnp.float16, True)])
def test_ragged_dot_is_what_a_tpu_gets_for_dtypes_without_a_kernel(dtype, is_ragged_dot):
    operands = [jax.ShapeDtypeStruct(s, dtype) for s in [(64, 8), (4, 8, 16)]]
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
    traced = jax.jit(gmm).trace(*operands, sizes)
    lowered = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert ("ragged_dot" in lowered) == is_ragged_dot
    assert ("tpu_custom_call" in lowered) != is_ragged_dot
    assert "ragged_dot" not in traced.lower(lowering_platforms=("cpu",)).as_text()
