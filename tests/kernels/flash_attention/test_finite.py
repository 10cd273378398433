import jax.numpy as jnp
import numpy as np
import pytest

from moelib.kernels.flash_attention.finite import poison_rows, poison_scores, zero_not_finite


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_scores_are_nan_where_an_operand_is_not_finite_and_values_are_finite(wrong):
    x = jnp.ones((1, 3, 1, 2))
    q, k, v = poison_scores(x.at[0, 0, 0, 0].set(wrong), x, x.at[0, 2, 0, 1].set(wrong))
    scores = jnp.einsum("bqhd,bkhd->qk", q, k)
    np.testing.assert_array_equal(
        np.isnan(scores), [[True, True, True], [False, False, True], [False, False, True]]
    )
    np.testing.assert_array_equal(v[0, :, 0], [[1, 1], [1, 1], [0, 0]])


def test_a_row_is_nan_if_its_logsumexp_or_its_gradient_is_not_finite():
    lse, delta = jnp.asarray([[[1.0, np.nan, 3.0]]]), jnp.asarray([[[1.0, 2.0, np.inf]]])
    lse, delta = poison_rows(lse, delta)
    np.testing.assert_array_equal(lse, [[[1, np.nan, np.nan]]])
    np.testing.assert_array_equal(delta, [[[1, 0, 0]]])


def test_only_what_is_not_finite_becomes_zero():
    (x,) = zero_not_finite(jnp.asarray([1.0, np.nan, -np.inf, 4.0], jnp.bfloat16))
    np.testing.assert_array_equal(x.astype(jnp.float32), [1, 0, 0, 4])
