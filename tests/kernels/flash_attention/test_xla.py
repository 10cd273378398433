import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.kernels.flash_attention import reference, xla


def temporary_bytes(seq_len):
    shape = jax.ShapeDtypeStruct((1, seq_len, 1, 8), jnp.float32)
    run = functools.partial(xla.attention, scale=1.0, block=16)
    compiled = jax.jit(jax.grad(lambda q, k, v: jnp.sum(run(q, k, v)), (0, 1, 2)))
    return compiled.lower(shape, shape, shape).compile().memory_analysis().temp_size_in_bytes


def test_memory_is_linear_in_the_sequence():
    assert temporary_bytes(1024) < 2.4 * temporary_bytes(512)


@pytest.mark.parametrize("block", [1, 5, 16, 64])
def test_the_size_of_a_block_changes_no_value(block):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 16, 2, 4)), jnp.float32) for _ in range(3))
    got = jax.jit(functools.partial(xla.attention, scale=0.5, block=block))(q, k, v)
    np.testing.assert_allclose(got, reference.attention(q, k, v, scale=0.5), rtol=1e-5, atol=1e-6)
