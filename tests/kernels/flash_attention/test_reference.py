import jax
import numpy as np
import pytest

from moelib.kernels.flash_attention import MaskSpec
from moelib.kernels.flash_attention.reference import attention, whole_sequences
from tests.kernels.flash_attention.cases import Case, operands


@pytest.mark.parametrize("window", [None, 5])
def test_a_window_is_that_of_jax(window):
    """JAX counts the tokens before the query, we count the query too."""
    q, k, v, *_ = operands(Case(24, 4, 2, 8))
    local = None if window is None else (window - 1, 0)
    want = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=local)
    got = jax.jit(attention, static_argnames="spec")(
        q, k, v, None, whole_sequences(24, None), spec=MaskSpec(8**-0.5, window=window)
    )
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_memory_is_linear_in_the_sequence():
    def temporary_bytes(length):
        q, k = (jax.ShapeDtypeStruct((1, length, h, 16), "float32") for h in (4, 2))
        of = lambda q, k: attention(q, k, k, None, whole_sequences(length, None), spec=MaskSpec(1))
        total = jax.grad(lambda q, k: of(q, k).sum(), (0, 1))
        return jax.jit(total).lower(q, k).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(2048) < 3 * temporary_bytes(1024)
