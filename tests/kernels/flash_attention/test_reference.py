import jax
import numpy as np
import pytest

from moelib.kernels.flash_attention import MaskSpec
from moelib.kernels.flash_attention.reference import attention
from tests.kernels.flash_attention.cases import Case, operands


@pytest.mark.parametrize("window", [None, 5])
def test_a_window_is_that_of_jax(window):
    """JAX counts the tokens before the query, we count the query too."""
    q, k, v, *_ = operands(Case(24, 4, 2, 8))
    local = None if window is None else (window - 1, 0)
    want = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=local)
    got = jax.jit(attention, static_argnames="spec")(
        q, k, v, None, None, spec=MaskSpec(8**-0.5, window=window)
    )
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
